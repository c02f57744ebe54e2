"""Megatron-Bridge: a recipe trains with the wrapper through scripts/pretrain_bridge.py.

Opt-in: needs megatron-bridge and what it imports, without its GPU packages
(see docs/contributing/test_runs.md).

    python -m pytest --full tests/integration/test_bridge.py
"""

from __future__ import annotations

import math
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from megatron_fsdp_adapter.checkpoint import folders
from megatron_fsdp_adapter.core.config import STRATEGIES
from megatron_fsdp_adapter.tools.cli import verify
from tests.lib.integration import lm_log
from tests.lib.integration.bridge_on_cpu import TINY_LLAMA
from tests.lib.integration.bridge_runs import EXAMPLE, need_bridge
from tests.lib.integration.lm_runs import ROOT, train_recipe

CHECKS = (
    "launch/bridge.py",
    "megatron/checkpoint/background_saves.py",
    "megatron/checkpoint/checkpoint_drivers.py",
)

pytestmark = pytest.mark.full
STEPS = 4


@pytest.fixture(scope="module", autouse=True)
def bridge() -> None:
    need_bridge()


def in_process(body: str) -> str:
    """Runs code after Megatron-Bridge was imported and a recipe made, in a process of its own."""
    prelude = """
        import tests.lib.integration.bridge_on_cpu as harness
        harness.prepare_bridge()
        from megatron.bridge.recipes.llama import llama3
        from megatron.bridge.training.utils.omegaconf_utils import process_config_with_overrides
        def recipe(*overrides):
            return process_config_with_overrides(
                llama3.llama32_1b_pretrain_config(), "tests/lib/integration/bridge_cpu.yaml",
                list(overrides))
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(prelude) + textwrap.dedent(body)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def stock_script(folder: Path) -> Path:
    """The example script without its one line."""
    line = "    apply_fsdp_overrides(cfg, strategy=given.strategy)\n"
    text = EXAMPLE.read_text()
    assert line in text
    script = folder / "stock.py"
    script.write_text(text.replace(line, ""))
    return script


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> lm_log.Values:
    """The same recipe with Megatron's own DDP."""
    run = train_recipe(stock_script(tmp_path_factory.mktemp("stock")), [])
    assert "FullyShardedDataParallel: strategy" not in run.log
    return run.values


@pytest.mark.parametrize("strategy", ("optim_grads_params", "optim"))
def test_recipe_trains_as_with_ddp(stock: lm_log.Values, strategy: str) -> None:
    """Losses and norms agree to a unit of the last printed digit: norms add up in another order,
    and gradients are clipped. The last loss is finite."""
    run = train_recipe(EXAMPLE, ["--strategy", strategy])
    assert f"FullyShardedDataParallel: strategy {strategy} over 2 ranks" in run.log
    assert run.log.count("apply_fsdp_overrides sets") == 1
    assert math.isfinite(float(run.values[STEPS, "lm loss"]))
    assert lm_log.differences(stock, run.values, last_digit=1) == []


OLDER = ""
FROM_0_6 = (
    "b.importlib.import_module('megatron.bridge.training.config').CheckpointConfig.async_strategy"
)
ASYNC = ("checkpoint.async_save=true", "checkpoint.save_interval=1")
DECENTRALIZED = ("dist.use_decentralized_pg=true", "dist.use_gloo_process_groups=false")
RESUMES: dict[str, tuple[str, tuple[str, ...], str]] = {
    **{name: (name, (), OLDER) for name in STRATEGIES},
    "optim_grads_params, asynchronous": ("optim_grads_params", ASYNC, FROM_0_6),
    "optim, asynchronous": ("optim", ASYNC, FROM_0_6),
    # `parallel_state` has no groups.
    **{f"{name}, groups of Bridge alone": (name, DECENTRALIZED, FROM_0_6) for name in STRATEGIES},
}
"""Strategy, overrides, and what Megatron-Bridge has to allow."""


@pytest.mark.parametrize("name", RESUMES)
def test_a_run_that_saves_trains_and_resumes_as_one_that_does_not(
    stock: lm_log.Values, name: str, tmp_path: Path
) -> None:
    """In every printed digit; digits of training as in `test_recipe_trains_as_with_ddp`. Where
    saves are asynchronous there is one in each step, each while the next step runs."""
    strategy, overrides, needs = RESUMES[name]
    need_bridge(needs)
    root = tmp_path / "saved"
    saving = [
        "--strategy",
        strategy,
        "checkpoint.save_interval=2",
        *overrides,
        f"checkpoint.save={root}",
    ]
    whole = train_recipe(EXAMPLE, saving)
    assert lm_log.differences(stock, whole.values, last_digit=1) == []
    if overrides is ASYNC:
        saved = (1, 2, 3, 4)
    else:
        saved = (2, 4)
    assert folders.complete_iterations(root) == saved
    assert folders.half_written(root) == ()
    for one in saved:
        assert verify.examine(folders.final_folder(root, one))["intact"]
    assert (overrides is ASYNC) == ("scheduled an async checkpoint save" in whole.log)
    assert (overrides is DECENTRALIZED) == ("initialized HyperCommGrid" in whole.log)
    resumed = train_recipe(EXAMPLE, [*saving, f"checkpoint.load={root}", "checkpoint.ckpt_step=2"])
    assert (2, "grad norm") not in resumed.values
    assert lm_log.differences(whole.values, resumed.values, start=3) == []


def test_resumes_where_tensor_parallelism_splits_the_model(tmp_path: Path) -> None:
    """Losses are those of the run that was not interrupted, but for the order of sums."""
    saving = [f"checkpoint.save={tmp_path / 'saved'}", "checkpoint.save_interval=2"]
    whole = train_recipe(EXAMPLE, saving)
    resumed = train_recipe(
        EXAMPLE,
        [
            f"checkpoint.load={tmp_path / 'saved'}",
            "checkpoint.ckpt_step=2",
            "model.tensor_model_parallel_size=2",
        ],
    )
    assert (2, "grad norm") not in resumed.values
    for step in (3, 4):
        losses = [float(run.values[step, "lm loss"]) for run in (whole, resumed)]
        assert abs(losses[0] - losses[1]) < 1e-4, (step, losses)


@pytest.mark.parametrize("strategy", ("optim_grads_params", "optim"))
def test_starts_from_a_hugging_face_folder(
    stock: lm_log.Values, strategy: str, tmp_path: Path
) -> None:
    """As with Megatron's own DDP; weights are those of the folder."""
    need_bridge(
        "b.importlib.import_module('megatron.bridge.training.checkpointing').is_hf_checkpoint_dir"
    )
    from transformers import LlamaConfig, LlamaForCausalLM

    LlamaForCausalLM(LlamaConfig(**TINY_LLAMA)).save_pretrained(tmp_path / "hf")
    start = [f"checkpoint.pretrained_checkpoint={tmp_path / 'hf'}"]
    expected = train_recipe(stock_script(tmp_path), start)
    assert lm_log.differences(stock, expected.values) != []
    run = train_recipe(EXAMPLE, ["--strategy", strategy, *start])
    assert lm_log.differences(expected.values, run.values, last_digit=1) == []


def test_overrides_make_a_recipe_that_bridge_accepts() -> None:
    """Forgotten: the checkpoint format, and one of the two switches. Both are set and printed."""
    printed = in_process("""
        from megatron_fsdp_adapter import apply_fsdp_overrides
        cfg = recipe("checkpoint.save=somewhere", "ddp.use_megatron_fsdp=true")
        apply_fsdp_overrides(cfg)
        cfg.validate()
        assert cfg.dist.use_megatron_fsdp and cfg.checkpoint.ckpt_format == "fsdp_dtensor"
    """)
    assert "checkpoint.ckpt_format" in printed
    assert "torch_dist -> fsdp_dtensor" in printed
    assert "dist.use_megatron_fsdp" in printed


def test_install_last_and_back() -> None:
    """Everything of Megatron-Bridge is imported first; afterwards every name is what it was."""
    in_process("""
        import sys
        from megatron.core.distributed import FullyShardedDataParallel as original
        import megatron.bridge.training.setup, megatron.bridge.training.train
        import megatron.bridge.models.model_provider
        def names():
            return {(n, a): v for n, m in list(sys.modules.items()) if n.startswith("megatron.")
                    for a, v in vars(m).items() if not a.startswith("__")}
        def holds(value, wrapper):
            return value is wrapper or (type(value) is tuple and wrapper in value)
        before = names()
        held = sorted(k for k, v in before.items() if holds(v, original))
        makers = {("megatron.bridge.models.model_provider", "FullyShardedDataParallel"),
                  ("megatron.training.models.dist_utils", "FullyShardedDataParallel")}
        testers = {("megatron.bridge.training.train", "megatron_FSDP"),
                   ("megatron.bridge.training.train", "_MEGATRON_FSDP_TYPES")}
        assert makers & set(held) and testers & set(held), held
        assert ("megatron.bridge.training.setup", "megatron_FSDP") in held, held
        from megatron_fsdp_adapter import FullyShardedDataParallel as ours, install, uninstall
        install()
        assert sorted(k for k, v in names().items() if holds(v, ours)) == held
        uninstall()
        after = names()
        assert [k for k in before if after[k] is not before[k] and not (
            type(before[k]) is tuple and after[k] == before[k])] == []  # tuples are rebuilt
    """)
