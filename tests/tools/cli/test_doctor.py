"""doctor reports the truth, as text and as JSON."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from megatron.core.optimizer import optimizer_config

from megatron_fsdp_adapter.megatron.compat import core_support
from megatron_fsdp_adapter.megatron.compat.table import installed
from megatron_fsdp_adapter.megatron.options.support import EMERGING
from megatron_fsdp_adapter.tools.cli import doctor, machine, nodes
from tests.lib.ranks.ranks import rendezvous

CHECKS = (
    "tools/cli/doctor.py",
    "tools/cli/machine.py",
    "tools/cli/nodes.py",
    "tools/cli/named_options.py",
    "megatron/compat/core_support.py",
)


def report(capsys: Any, *argv: str, status: int = 0) -> dict[str, Any]:
    assert doctor.main(["--json", *argv]) == status
    printed = capsys.readouterr().out
    return json.loads(printed)


def refused_options(found: dict[str, Any]) -> list[str]:
    """What the lines of a report begin with that refuse something."""
    lines = found["configuration"]["refuses"]
    return [line.split(":")[0] for line in lines]


def test_versions_and_bindings(capsys: Any) -> None:
    found = report(capsys)
    expected = {"version": version("megatron-core"), "tested": True}
    assert found["versions"]["megatron-core"] == expected
    assert found["bindings"] == {}
    assert not installed()
    assert "configuration" not in found


GRAPHS = "cuda_graph_impl='local'"
SLOTS = "fsdp_double_buffer=True"
KEPT = "data_parallel_sharding_strategy='optim'"
EP_3 = "expert_model_parallel_size=3"
JUDGED: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "FP4": (
        (
            "tensor_model_parallel_size=2",
            "num_experts=8",
            "expert_model_parallel_size=4",
            "num_distributed_optimizer_instances=2",
            "fp4=e2m1",
            "save='somewhere'",
        ),
        ("fp4=",),
    ),
    "what this machine cannot compute": (
        ("fp8=hybrid", "fp8_recipe=mxfp8", "fp8_param_gather=True"),
        ("fp8='hybrid' with fp8_recipe='mxfp8': device cpu does not support it",),
    ),
    "a size, of num_moe_experts": (("num_moe_experts=4", EP_3), (EP_3,)),
    # As Megatron-LM's arguments call it.
    "a size, of num_experts": (("num_experts=4", EP_3), (EP_3,)),
    "a flag of Megatron-LM": (("--tensor-model-parallel-size=2",), ()),
    "graphs without slots": ((GRAPHS,), ("fsdp_double_buffer=False",)),
    "graphs with slots": ((GRAPHS, SLOTS), ()),
    "graphs of weights that stay": ((GRAPHS, SLOTS, KEPT), ()),
}
"""Options, and what the lines that refuse them have."""


@pytest.mark.parametrize("name", JUDGED)
def test_a_configuration_is_judged(name: str, capsys: Any) -> None:
    options, texts = JUDGED[name]
    sets = [f"--set={one}" for one in options]
    report_of_all = report(capsys, "--world-size=16", *sets, status=1 if texts else 0)
    found = report_of_all["configuration"]
    lines = found["refuses"]
    assert found["ranks"] == 16
    for text in texts:
        assert any(text in line for line in lines)
    for line in lines:
        assert any(text in line for text in texts), lines


@pytest.mark.parametrize("field", [None, "muon_use_nesterov", "muon_nesterov"])
def test_muon_and_lion_are_judged_by_what_the_optimizer_config_has(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, field: str | None
) -> None:
    """Of the core that is here, and of others, whatever their versions say."""
    if field is not None:
        other = dataclasses.make_dataclass("OptimizerConfig", [(field, bool, False)])
        monkeypatch.setattr(optimizer_config, "OptimizerConfig", other)
    makes_it = hasattr(optimizer_config.OptimizerConfig, "muon_nesterov")
    for kind in EMERGING:
        found = report(capsys, "--set", f"optimizer={kind}", status=0 if makes_it else 1)
        if makes_it:
            assert refused_options(found) == []
        else:
            assert refused_options(found) == [f"optimizer={kind!r}"]
    found = report(capsys, "--set", "optimizer=muon", "--set", "muon_scale_mode=none", status=1)
    assert "muon_scale_mode='none' with optimizer='muon'" in refused_options(found)


def test_without_a_number_of_ranks_nothing_is_said_that_depends_on_it(
    capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    words = ("--set", "tensor_model_parallel_size=3", "--set", "global_batch_size=5")
    found = report(capsys, *words)["configuration"]
    assert "--world-size" in found["ranks"]
    assert not found["refuses"]
    monkeypatch.setenv("WORLD_SIZE", "16")
    found = report(capsys, *words, status=1)
    assert len(refused_options(found)) == 1


README = Path(__file__).parents[3] / "README.md"
PROVE_8B = ("--prove", "--preset=llama3-8b")
MISTAKES: dict[tuple[str, ...], tuple[str, ...]] = {
    ("--set", "tensor_model_parallel=2", "--set", "qqq=1"): (
        "doctor: --set tensor_model_parallel=2: unknown option.*Did you mean "
        "tensor_model_parallel_size",
        "--set qqq=1: unknown option.*Leave it out",
    ),
    ("--set", "nothing"): (r"doctor: --set nothing: no value\. Write option=value\.$",),
    ("/absent.py",): ("doctor: no such script: /absent.py$",),
    (str(README),): ("doctor: .*README.md: no Python script",),
    ("--world-size", "0"): ("doctor: --world-size 0: ",),
    ("--world-size", "-2"): ("doctor: --world-size -2: ",),
    ("--prove",): ("doctor --prove: ",),
    ("--prove", "/absent.py"): ("doctor --prove: ",),
    (*PROVE_8B, "--keep=bf16"): ("doctor --prove: ",),
    (*PROVE_8B, "--set", "sharding_strategy=optim"): (
        "doctor --prove: .*data_parallel_sharding_strategy",
    ),
}
"""Words, and patterns of the beginnings of all lines."""

for value in ("abc", "0", "-2", "2.5", "True"):
    given = f"tensor_model_parallel_size={value}"
    MISTAKES["--world-size", "8", "--set", given] = (
        f"doctor: --set {given}: not an integer above 0. Write one",
    )


@pytest.mark.parametrize("words", MISTAKES, ids=" ".join)
def test_a_mistake_is_a_line(capsys: Any, words: tuple[str, ...]) -> None:
    assert doctor.main(words) == 2
    lines = capsys.readouterr().err.splitlines()
    for line, pattern in zip(lines, MISTAKES[words], strict=True):
        assert re.match(pattern, line), line


def test_variables_that_hurt() -> None:
    harmless = {"CUDA_DEVICE_MAX_CONNECTIONS": "8", "NCCL_P2P_DISABLE": "0", "NCCL_DEBUG": "INFO"}
    assert machine.harmful_variables(harmless) == []
    harmful = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "NCCL_P2P_DISABLE": "1", "NCCL_DEBUG": "trace"}
    found = {row["variable"] for row in machine.harmful_variables(harmful)}
    assert found == set(harmful)


def test_text_has_every_section(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    assert doctor.main(["--set", "defer_embedding_wgrad_compute=True"]) == 1
    lines = capsys.readouterr().out.splitlines()
    for beginning in (
        "versions",
        "machine",
        "environment",
        "  CUDA_LAUNCH_BLOCKING=1: ",
        "configuration: refuses",
        "  - defer_embedding_wgrad_compute=True: ",
    ):
        assert any(line.startswith(beginning) for line in lines), beginning
    hurts = "Harmful variables (above): CUDA_LAUNCH_BLOCKING"
    assert lines[-1] == f"doctor: refused, 1 to change (above). {hurts}"
    of_bindings = [line for line in lines if "rebind" in line or "rebound" in line]
    assert len(of_bindings) == 1

    monkeypatch.delenv("CUDA_LAUNCH_BLOCKING")
    assert doctor.main(["--set", "data_parallel_sharding_strategy=optim"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "doctor: nothing is refused"
    assert doctor.main([]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "doctor: nothing is wrong here (no configuration was given)"


@pytest.mark.parametrize(
    "error", [ModuleNotFoundError(name="megatron"), RuntimeError("this Megatron has no such name")]
)
def test_whatever_is_an_error_gives_status_1(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Also of the installation, with and without a configuration."""
    fails = mock.Mock(side_effect=error)
    monkeypatch.setattr(core_support, "require_supported_core", fails)
    for words in ((), ("--set", "data_parallel_sharding_strategy=optim")):
        assert doctor.main(words) == 1
        text = capsys.readouterr().out
        assert (str(error) or "megatron is not installed") in text
        assert text.splitlines()[-1] == "doctor: refused, 1 to change (above)"


ROWS = [
    {"torch": "2.13.0", "NCCL": "2.28"},
    {"torch": "2.13.0", "NCCL": "2.28"},
    {"torch": "2.15.0", "NCCL": "2.28"},
    {"torch": "2.13.0"},
]


def test_ranks_that_differ_are_named() -> None:
    differ = nodes.differences(ROWS, ["a", "a", "b", "b"])
    assert differ == [
        "torch: 2.13.0 on 3 of 4 ranks, 2.15.0 on rank 2 (b)",
        "NCCL: 2.28 on 3 of 4 ranks, absent on rank 3 (b)",
    ]
    first, same, other, _ = ROWS
    [line] = nodes.differences([first, first, first, other, other], ["a", "a", "b", "b", "b"])
    assert line == "torch: 2.13.0 on 3 of 5 ranks, 2.15.0 on rank 3 (b) and 1 more"
    assert nodes.differences([first, same], ["a", "b"]) == []
    assert doctor.problems({"bindings": {}, "ranks": {"differ": differ}}) == differ


def test_ports_of_a_fast_network_are_listed(tmp_path: Path) -> None:
    port = tmp_path / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    (port / "link_layer").write_text("Ethernet\n")
    (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    assert machine.rdma_ports(tmp_path) == ["mlx5_0:1 Ethernet unknown 400 Gb/sec (4X NDR)"]


def test_ranks_of_two_nodes_are_examined_together(tmp_path: Path) -> None:
    """Two launchers that meet by c10d, whose ranks have another environment: the first prints."""
    with rendezvous(2) as place:
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1",
            "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{place['MASTER_PORT']}",
            "--rdzv-id=doctor", "--rdzv-conf=is_host=0", "-m", "megatron_fsdp_adapter", "doctor",
            "--json",
        ]  # fmt: skip
        launchers = []
        for index in ("3", "1"):
            launcher = subprocess.Popen(
                command,
                env={**os.environ, "NCCL_IB_GID_INDEX": index},
                cwd=tmp_path,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            launchers.append(launcher)
        ended = [one.communicate(timeout=240) for one in launchers]
    assert [one.returncode for one in launchers] == [0, 0], ended
    [printed] = [out for out, _ in ended if out]
    found = json.loads(printed)["ranks"]
    assert len(set(found["nodes"])) == 2
    assert found["differ"] == []
    [line] = found["variables differ"]
    assert line.startswith("NCCL_IB_GID_INDEX: ")
    assert " on 1 of 2 ranks, " in line
