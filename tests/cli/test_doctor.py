"""doctor reports the truth, as text and as JSON."""

from __future__ import annotations

import dataclasses
import json
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.optimizer import optimizer_config

from megatron_fsdp_adapter.cli import doctor, machine
from megatron_fsdp_adapter.megatron.options.support import EMERGING
from megatron_fsdp_adapter.megatron.seams.rebound import installed


def report(capsys: Any, *argv: str, status: int = 0) -> dict[str, Any]:
    assert doctor.main(["--json", *argv]) == status
    return json.loads(capsys.readouterr().out)


def test_versions_and_bindings(capsys: Any) -> None:
    found = report(capsys)
    assert found["versions"]["megatron-core"] == {
        "version": version("megatron-core"), "tested": True
    }  # fmt: skip
    places = found["bindings"]["rebound"]["FullyShardedDataParallel"]
    assert "megatron.core.distributed.FullyShardedDataParallel" in places
    assert not installed(), "it puts everything back"
    assert "configuration" not in found


def test_a_configuration_is_judged(capsys: Any) -> None:
    found = report(
        capsys, "--world-size", "16", "--set", "tensor_model_parallel_size=2",
        "--set", "num_experts=8", "--set", "expert_model_parallel_size=4",
        "--set", "num_distributed_optimizer_instances=2", "--set", "fp4=e2m1",
        "--set", "save='somewhere'", status=1,
    )["configuration"]  # fmt: skip
    assert found["groups"] == {
        "world size": 16, "dense": 4, "experts": 1, "optimizer instances": 2
    }  # fmt: skip
    named = {line.split("=")[0] for line in found["refuses"]}
    assert named == {"fp4"}


@dataclasses.dataclass
class _WithOlderName:
    muon_use_nesterov: bool = False


@dataclasses.dataclass
class _WithItsName:
    muon_nesterov: bool = False


@pytest.mark.parametrize("fields", [None, _WithOlderName, _WithItsName])
def test_muon_and_lion_are_judged_by_what_the_optimizer_config_has(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, fields: Any
) -> None:
    """Of the core that is here, and of others, whatever their versions say."""
    if fields is not None:
        monkeypatch.setattr(optimizer_config, "OptimizerConfig", fields)
    makes_it = hasattr(optimizer_config.OptimizerConfig, "muon_nesterov")
    for kind in EMERGING:
        found = report(capsys, "--set", f"optimizer={kind}", status=0 if makes_it else 1)
        named = [line.split(":")[0] for line in found["configuration"]["refuses"]]
        assert named == ([] if makes_it else [f"optimizer={kind!r}"])
    found = report(capsys, "--set", "optimizer=muon", "--set", "muon_scale_mode=none", status=1)
    named = [line.split(":")[0] for line in found["configuration"]["refuses"]]
    assert "optimizer='muon' with muon_scale_mode='none'" in named


@pytest.mark.skipif(torch.cuda.is_available(), reason="this GPU may compute it")
def test_what_this_machine_cannot_compute_is_refused(capsys: Any) -> None:
    found = report(capsys, "--set", "fp8=hybrid", "--set", "fp8_recipe=mxfp8",
                   "--set", "fp8_param_gather=True", status=1)  # fmt: skip
    [line] = found["configuration"]["refuses"]
    assert line.startswith("fp8='hybrid' with fp8_recipe='mxfp8': device cpu cannot compute it")


def test_ranks_that_cannot_be_shared_out(capsys: Any) -> None:
    options = SimpleNamespace(num_distributed_optimizer_instances=1, tensor_model_parallel_size=3)
    assert doctor.group_sizes(options, 8)["dense"].startswith("error")


def test_variables_that_hurt() -> None:
    harmless = {"CUDA_DEVICE_MAX_CONNECTIONS": "8", "NCCL_P2P_DISABLE": "0", "NCCL_DEBUG": "INFO"}
    assert machine.harmful_variables(harmless) == []
    harmful = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "NCCL_P2P_DISABLE": "1", "NCCL_DEBUG": "trace"}
    assert {row["variable"] for row in machine.harmful_variables(harmful)} == set(harmful)


def test_text_has_every_section(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    assert doctor.main(["--set", "defer_embedding_wgrad_compute=True"]) == 1
    text = capsys.readouterr().out
    for line in ("versions", "machine", "environment", "  CUDA_LAUNCH_BLOCKING=1: ",
                 "configuration: refuses", "  - defer_embedding_wgrad_compute=True: "):  # fmt: skip
        assert f"\n{line}" in f"\n{text}"


def test_an_option_counts_under_the_name_that_the_config_has(capsys: Any) -> None:
    """`num_moe_experts` is what Megatron-LM's arguments call `num_experts`."""
    for name in ("num_moe_experts", "num_experts"):
        found = report(capsys, "--world-size", "8", "--set", f"{name}=4")
        assert found["configuration"]["groups"]["experts"] == 8, name


def test_bad_input_is_one_line(capsys: Any, tmp_path: Path) -> None:
    assert doctor.main(["--set", "nothing"]) == 2
    assert doctor.main([str(tmp_path / "absent.py")]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "doctor: --set nothing: write option=value",
        f"doctor: no such script: {tmp_path / 'absent.py'}",
    ]


def test_what_cuda_graphs_exclude_is_refused(capsys: Any) -> None:
    def refused(*more: str, status: int) -> list[str]:
        asked = ("cuda_graph_impl='local'", *more)
        sets = [word for one in asked for word in ("--set", one)]
        lines = report(capsys, *sets, status=status)["configuration"]["refuses"]
        assert isinstance(lines, list)
        return lines

    (line,) = refused(status=1)
    assert "fsdp_double_buffer=False" in line and "set it to True" in line
    assert refused("fsdp_double_buffer=True", status=0) == []
    kept = "data_parallel_sharding_strategy='optim'"
    (line,) = refused("fsdp_double_buffer=True", kept, status=1)
    assert line.startswith(kept)
