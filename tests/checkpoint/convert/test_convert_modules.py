"""Every module that core's layer specs name is converted in both directions, or refused by name.

Models of `tests/lib/checkpoint/core_models.py` are built by core's own specs and classes, with
stand-ins on the CPU for Transformer Engine, mamba_ssm and fla. Stock DDP loads what is converted
from ours and saves it again, and ours loads what is converted from that.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_fsdp_adapter.checkpoint import load_checkpoint, save_checkpoint
from megatron_fsdp_adapter.checkpoint.convert import convert
from tests.lib.checkpoint.convert_cases import Model, fsdp_state, save_fsdp

CHECKS = (
    "checkpoint/convert/modules.py",
    "checkpoint/convert/stacks.py",
    "checkpoint/convert/param_groups.py",
    "checkpoint/convert/torch_dist.py",
    "checkpoint/convert/fsdp_dtensor.py",
    "checkpoint/convert/training_state.py",
    "checkpoint/fitting.py",
)

FAST = (
    "TE, MLA with norms, experts behind a dense layer, MTP",
    "hybrid",
    "local, decayed norms of queries and keys",
)

NOT_BUILT = {
    "FusedMLASelfAttention": "refused: test_a_module_that_is_not_known_is_refused_by_name",
    "TEFusedMLP": "the parameters of MLP, which it inherits",
    "InferenceColumnParallelLinear": "inference only",
    "InferenceGroupedMLP": "inference only",
    "InferenceLayerNormColumnParallelLinear": "inference only",
    "InferenceRowParallelLinear": "inference only",
    "InferenceTopKRouter": "inference only",
    "GroupedMLP": "refused: test_an_argument_for_unknown_modules_is_refused",
    "L2Norm": "no parameters",
    "DSAttention": "core 0.16 refuses it in the spec of a whole model; 0.19's is built",
    "DSAIndexer": "the same",
}
"""Classes that specs name and no row has -> why not."""


def run(*rows: str, timeout: float) -> dict[str, Any]:
    """The report of `core_modules` on these rows; on all, and on the specs, without any."""
    command = [sys.executable, "-m", "tests.lib.checkpoint.core_modules", *rows]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[3],
    )
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return json.loads(lines[-1])  # type: ignore[no-any-return]


def test_models_of_core_come_back_through_stock() -> None:
    found = run(*FAST, timeout=300)
    assert found["trips"] == {row: [] for row in FAST}


@pytest.mark.full
def test_every_module_of_the_specs_is_converted_or_refused() -> None:
    found = run(timeout=3000)
    assert len(found["trips"]) > 30
    assert {row: problems for row, problems in found["trips"].items() if problems} == {}
    missing = set(found["specs"]) - set(found["built"]) - NOT_BUILT.keys()
    assert missing == set()


NAMES = (
    ("module.mtp.layers.0.mtp_model_layer.mlp.x", "module.mtp.layers.0.transformer_layer.mlp.x"),
    ("module.decoder.layers.0.mixer.conv1d_bias", "module.decoder.layers.0.mixer.conv1d.bias"),
)
"""Newer and older."""


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("names", [NAMES, [pair[::-1] for pair in NAMES]], ids=["older", "newer"])
def test_a_checkpoint_of_another_release_is_loaded(
    tmp_path: Path, names: list[tuple[str, str]]
) -> None:
    """Core renamed modules. What was not renamed in a hybrid model keeps its name."""
    same = "module.mtp.layers.0.mtp_model_layer.layers.1.mlp.x"

    def state(which: int, value: float) -> dict[str, Any]:
        of_model = [*(pair[which] for pair in names), same]
        found = {name: torch.full((2,), value) for name in of_model}
        options = {name: {"lr": value} for name in of_model}
        return {"model": found, "optimizer": {"param_to_group_meta": options}}

    save_checkpoint(str(tmp_path), 1, state(1, value=5.0))
    _, read = load_checkpoint(str(tmp_path), state(0, value=0.0))
    wanted = state(0, value=5.0)
    assert read["optimizer"] == wanted["optimizer"]
    assert read["model"].keys() == wanted["model"].keys()
    assert all(bool((value == 5.0).all()) for value in read["model"].values())


# Checkpoints with modules that are not known.

Change = Callable[[dict[str, Any]], None]
AT = "module.decoder.layers.0."


def with_module(state: dict[str, Any], name: str, *shape: int) -> None:
    state["model"][AT + name] = torch.zeros(shape or (4,))


def delta_net(state: dict[str, Any], in_proj: int, dt_bias: int) -> None:
    """A delta net of 8 inner channels, 2 heads, and 4 channels each of queries and keys."""
    with_module(state, "self_attention.in_proj.weight", in_proj, 16)
    with_module(state, "self_attention.out_proj.weight", 16, 8)
    with_module(state, "self_attention.conv1d.weight", 16, 1, 3)
    with_module(state, "self_attention.A_log", 2)
    with_module(state, "self_attention.dt_bias", dt_bias)


def delta_product(state: dict[str, Any]) -> None:
    """A mixer in a Mamba layer that is not Mamba: it has no D."""
    with_module(state, "mixer.in_proj.weight", 26, 16)
    with_module(state, "mixer.out_proj.weight", 16, 8)
    with_module(state, "mixer.conv1d.weight", 16, 1, 3)
    with_module(state, "mixer.A_log", 2)
    with_module(state, "mixer.dt_bias", 2)


UNKNOWN: dict[str, tuple[Change, str]] = {
    "fused down projection": (
        lambda state: with_module(state, "self_attention.linear_qkv_down_proj.weight"),
        "decoder.layers.0.self_attention.linear_qkv_down_proj.weight",
    ),
    "adapter": (
        lambda state: with_module(state, "mlp.linear_fc2.adapter.linear_in.weight"),
        "decoder.layers.0.mlp.linear_fc2.adapter.linear_in.weight",
    ),
    "tower": (
        lambda state: state["model"].update({"module.vision_model.proj.weight": torch.zeros(2)}),
        "vision_model.proj.weight",
    ),
    "grouped experts of core": (
        lambda state: with_module(state, "mlp.experts.weight1", 4, 4),
        "decoder.layers.0.mlp.experts.weight1",
    ),
    "another delta net": (
        lambda state: delta_net(state, in_proj=40, dt_bias=8),
        "decoder.layers.0.self_attention.in_proj.weight has 40 rows",
    ),
    "delta product": (delta_product, "decoder.layers.0.mixer.in_proj.weight has 26 rows"),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_module_that_is_not_known_is_refused_by_name(tmp_path: Path, name: str) -> None:
    change, message = UNKNOWN[name]
    state = fsdp_state(Model())
    change(state)
    save_fsdp(tmp_path / "source", state)
    with pytest.raises(ValueError, match=message):
        convert(tmp_path / "source", tmp_path / "target", "torch_dist")
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize(
    ("argument", "module"),
    [
        ("heterogeneous_layers_config_path", "a heterogeneous model"),
        ("heterogeneous_layers_config_encoded_json", "a heterogeneous model"),
        ("mla_down_proj_fusion", "linear_qkv_down_proj"),
        ("moe_use_legacy_grouped_gemm", "weight1"),
        ("moe_single_grouped_weight", "mlp.experts with one weight"),
        ("moe_single_grouped_bias", "mlp.experts with one bias"),
    ],
)
def test_an_argument_for_unknown_modules_is_refused(
    tmp_path: Path, argument: str, module: str
) -> None:
    """Keys of `torch_dist` do not show these modules."""
    save_fsdp(tmp_path / "first", fsdp_state(Model()))
    convert(tmp_path / "first", tmp_path / "source", "torch_dist")
    path = tmp_path / "source" / "iter_0000003" / "common.pt"
    common = torch.load(path, weights_only=False)
    del common["fsdp_dtensor_names"]
    setattr(common["args"], argument, "x")
    torch.save(common, path)
    with pytest.raises(ValueError, match=f"{argument}='x': .*{module}"):
        convert(tmp_path / "source", tmp_path / "target", "fsdp_dtensor")
    assert not (tmp_path / "target").exists()
