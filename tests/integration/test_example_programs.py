"""The programs in examples/ that are above other packages: they train on two ranks and say that the
model is sharded, or the package reads what they give it.

Opt-in by what is installed: see docs/contributing/test_runs.md.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.lib.integration import lm_log
from tests.lib.integration.bridge_runs import need_bridge
from tests.lib.integration.lm_runs import HARNESSES, NO_KERNELS, ROOT, SMALL, finish, start
from tests.lib.scripts.script_runs import run_script

CHECKS = ("plain/torch_fsdp.py", "launch/runner.py", "launch/bridge.py", "launch/verl_plugin.py")

pytestmark = pytest.mark.full

EXAMPLES = ROOT / "examples"
SHARDED = "FullyShardedDataParallel: strategy optim_grads_params over 2 ranks"


def _need(*packages: str) -> None:
    for name in packages:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")


def _run(harness: str, name: str, *arguments: str) -> str:
    """What an example prints on two ranks, made to run on a CPU by `harness`."""
    program = str(EXAMPLES / name)
    done = run_script(str(HARNESSES / harness), program, *arguments, processes=2, timeout=500.0)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_trainer_shards_saves_and_goes_on(tmp_path: Path) -> None:
    _need("transformers", "accelerate")
    for steps in (4, 8):
        printed = _run(
            "accelerate_on_cpu.py", "trainer.py", f"--steps={steps}", f"--output={tmp_path}"
        )
        assert "LlamaForCausalLM has 5 units over 2 ranks" in printed
        assert printed.count("DTensor (128, 64), here=(64, 64)") == 1
        assert printed.count("'loss'") == 4, "each of the two runs trains four steps"
        assert (tmp_path / f"checkpoint-{steps}").is_dir()
    assert (tmp_path / "final" / "model.safetensors").is_file()


def test_adapters_of_trl_are_sharded_and_saved_whole(tmp_path: Path) -> None:
    _need("trl", "peft", "transformers", "accelerate")
    from safetensors.torch import load_file

    printed = _run("accelerate_on_cpu.py", "sft_lora.py", f"--output={tmp_path}")
    assert "PeftModelForCausalLM has 5 units over 2 ranks" in printed
    assert "lora_A.default.weight: DTensor (8, 64), here=(4, 64)" in printed
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert {value.shape for value in saved.values()} == {(8, 64), (64, 8)}


def test_torchtitan_trains_a_sharded_model(tmp_path: Path, monkeypatch: Any) -> None:
    _need("torchtitan", "spmd_types", "triton", "datasets", "tensorboard")
    monkeypatch.chdir(tmp_path)
    printed = _run("titan_on_cpu.py", "titan.py")
    assert "Llama3Model has 5 units over 2 ranks" in printed
    assert "DTensor torch.Size([768, 256]), here torch.Size([384, 256])" in printed


def _words(script: str, program: str, folder: Path, environment: Mapping[str, str]) -> list[str]:
    """The words that a bash script of examples/ hands to `program`."""
    place = folder / program
    place.write_text(f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    place.chmod(0o755)
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", str(EXAMPLES / script)],
        env={**os.environ, **environment, "PATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    words = json.loads(done.stdout)
    assert all(type(word) is str for word in words)
    return words


def test_the_command_of_megatron_lm_is_accepted_and_trains(
    megatron_lm: Path, tmp_path: Path
) -> None:
    """By `doctor` as it is, and on a CPU with the sizes of a small model."""
    environment = {"MEGATRON_LM": str(megatron_lm), "CHECKPOINTS": str(tmp_path / "saved")}
    launched = _words("megatron_lm.sh", "torchrun", tmp_path, environment)
    script = str(megatron_lm / "pretrain_gpt.py")
    assert launched[:5] == ["--nproc-per-node", "8", "-m", "megatron_fsdp_adapter", script]
    checked = _words("megatron_lm.sh", "python", tmp_path, {**environment, "DOCTOR": "1"})
    at = checked.index(script)
    assert checked[:at] == ["-m", "megatron_fsdp_adapter", "doctor", "--world-size", "8"]
    assert checked[at:] == launched[4:]
    done = subprocess.run([sys.executable, *checked], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "doctor: nothing is refused" in done.stdout
    log = tmp_path / "log"
    sizes = [
        "--ffn-hidden-size",
        "128",
        "--num-query-groups",
        "2",
        "--data-cache-path",
        str(tmp_path / "cache"),
    ]
    small = [*launched[5:], *SMALL, *NO_KERNELS, *sizes, "--lr-warmup-iters", "0"]
    run = finish(start("on_cpu.py", Path(script), small, 2, log), log, 600.0)
    assert run.status == 0, run.end
    assert SHARDED in run.log
    assert (6, "lm loss") in lm_log.read(run.log)
    assert (tmp_path / "saved" / "latest_checkpointed_iteration.txt").read_text() == "6"


def _overrides(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Values of a YAML file as words of a command line."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _overrides(value, f"{prefix}{key}.")
        else:
            yield f"++{prefix}{key}={json.dumps(value).strip(chr(34))}"


def test_a_recipe_of_bridge_trains_and_goes_on(tmp_path: Path) -> None:
    need_bridge()
    small = yaml.safe_load((HARNESSES / "bridge_cpu.yaml").read_text())
    for section in ("save", "load"):
        small["checkpoint"][section] = str(tmp_path / "saved")
    small["dataset"]["path_to_cache"] = str(tmp_path / "cache")
    for steps in (2, 4):
        small["train"]["train_iters"] = steps
        log = tmp_path / f"log{steps}"
        words = list(_overrides(small))
        started = start("bridge_on_cpu.py", EXAMPLES / "bridge_recipe.py", words, 2, log)
        run = finish(started, log, 600.0)
        assert run.status == 0, run.end
        assert SHARDED in run.log
        found = sorted(step for step, what in run.values if what == "lm loss")
        assert found == [steps - 1, steps]


_READ = """
import json, sys
from hydra import compose, initialize_config_module
from verl.utils.config import omega_conf_to_dataclass
with initialize_config_module("verl.trainer.config", version_base=None):
    read = compose("ppo_trainer", overrides=sys.argv[1:])
engine = omega_conf_to_dataclass(read.actor_rollout_ref.actor.megatron)
print(type(engine).__name__, engine.use_megatron_fsdp, engine.override_ddp_config)
"""


def test_verl_reads_the_options_of_its_command(tmp_path: Path) -> None:
    """Its configuration refuses names that it does not have."""
    _need("verl")
    need_bridge()
    given = dict.fromkeys(("MODEL", "TRAIN", "VALID"), "somewhere")
    words = _words("verl_grpo.sh", "python", tmp_path, given)
    assert words[:2] == ["-m", "verl.trainer.main_ppo"]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _READ, *words[2:]],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    strategy = "{'data_parallel_sharding_strategy': 'optim_grads_params'}"
    assert done.stdout.splitlines()[-1] == f"McoreEngineConfig True {strategy}"
