"""There and back between formats is the identity, bit for bit; and the formats are right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_fsdp_adapter.checkpoint.convert import convert, detect_format
from megatron_fsdp_adapter.tools.cli.verify import examine
from tests.lib.checkpoint.convert_cases import (
    MODELS,
    Model,
    differences,
    fsdp_state,
    load_all,
    save_fsdp,
)

CHECKS = (
    "checkpoint/convert/conversion.py",
    "checkpoint/convert/fsdp_dtensor.py",
    "checkpoint/convert/torch_dist.py",
    "checkpoint/convert/training_state.py",
    "checkpoint/convert/param_groups.py",
    "checkpoint/convert/common_state.py",
)

SMALL = 700
"""Bytes of a block: most tensors fall into several."""

FOLDER = "iter_0000003"
SLOW = ("experts behind a dense layer", "dense, fp32, not gated")


def trip(root: Path, source: Any, *steps: tuple[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Converts a state of fsdp_dtensor to root/1, 2, ... step by step; all that is in each."""
    save_fsdp(root / "0", source)
    for number, (to, options) in enumerate(steps, 1):
        report = convert(root / str(number - 1), root / str(number), to, **options)
        assert report["dropped"] == ()
    return [load_all(root / str(number) / FOLDER) for number in range(len(steps) + 1)]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] * (name in SLOW)) for name in MODELS]
)
def test_to_torch_dist_and_back_is_the_identity(tmp_path: Path, name: str) -> None:
    """With a tensor without elements, as a list of what was seen has before anything was."""
    model = MODELS[name]
    state = {**fsdp_state(model), "data": {"seen": torch.zeros(0, 3, dtype=torch.int64)}}
    small = {"block_bytes": SMALL}
    formats = ("fsdp_dtensor", "torch_dist", "fsdp_dtensor")
    before, same, between, after = trip(tmp_path, state, *((to, small) for to in formats))
    assert detect_format(tmp_path / "2") == "torch_dist"
    assert len(before) > 100
    assert before["data.seen"].shape == (0, 3)
    assert differences(before, same) == differences(before, after) == []
    for root in (tmp_path / "1", tmp_path / "3"):
        assert (root / "latest_checkpointed_iteration.txt").read_text() == "3"
        report = examine(root / FOLDER)
        assert report["intact"]
        assert report["without_digest"] == []
    _check_torch_dist(model, state["model"], between)


def _check_torch_dist(
    model: Model, weights: dict[str, torch.Tensor], found: dict[str, torch.Tensor]
) -> None:
    """Layers and experts are stacked, and what the model computes in is rounded."""
    dtype = torch.bfloat16 if model.bf16 else torch.float32
    biases = [value for key, value in found.items() if key.endswith("expert_bias")]
    for value in biases:
        assert value.dtype == torch.float32
    assert bool(biases) == bool(model.experts)
    qkv = "self_attention.linear_qkv.weight"
    fc2 = "mlp.experts.experts.linear_fc2.weight"
    for layer in range(model.layers):
        at, place = (f"{layer}.", ()) if model.dense_layers else ("", (layer,))
        expected = weights[f"module.decoder.layers.{layer}.{qkv}"]
        key = f"decoder.layers.{at}{qkv}"
        assert found[key].dtype == dtype
        assert torch.equal(found[key][place], expected.to(dtype))
        assert torch.equal(found[f"optimizer.state.param.{key}"][place], expected)
        if not model.experts or layer < model.dense_layers:
            continue
        if model.grouped:
            named = "linear_fc2.weight1"
        else:
            named = "local_experts.1.linear_fc2.weight"
        expected = weights[f"module.decoder.layers.{layer}.mlp.experts.{named}"]
        assert torch.equal(found[f"decoder.layers.{at}{fc2}"][(*place, 1)], expected.to(dtype))


def test_a_key_that_torch_dist_needs_is_not_brought_back(tmp_path: Path) -> None:
    state = fsdp_state(Model())
    del state["checkpoint_version"]
    before, _, after = trip(tmp_path, state, ("torch_dist", {}), ("fsdp_dtensor", {}))
    assert "checkpoint_version" not in before.keys() | after.keys()
    common = torch.load(tmp_path / "1" / FOLDER / "common.pt", weights_only=False)
    assert common["checkpoint_version"] == 3.0
    assert differences(before, after) == []


def test_weights_only_leaves_out_optimizer_scheduler_and_generators(tmp_path: Path) -> None:
    only = {"weights_only": True}
    found = trip(tmp_path, fsdp_state(Model()), ("torch_dist", only), ("fsdp_dtensor", only))[-1]
    parts = {key.split(".")[0] for key in found}
    assert parts == {"model", "args", "checkpoint_version", "iteration"}
