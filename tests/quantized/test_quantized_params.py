"""Quantized weights of the engine in one process: what may be read of them and when, what is
derived from them, and their bytes; what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from megatron_fsdp_adapter.build.description import param_rows
from megatron_fsdp_adapter.build.same_model import model_lines
from megatron_fsdp_adapter.core.config import STRATEGIES
from megatron_fsdp_adapter.core.engine import saved_tensors
from megatron_fsdp_adapter.core.engine.partition import managed_params, partition
from megatron_fsdp_adapter.core.engine.unit import Phase
from megatron_fsdp_adapter.core.runtime.device import storage_bytes
from megatron_fsdp_adapter.plan.memory import (
    LIFE,
    OPTIMIZER_STATE,
    PERSISTENT,
    Precision,
    group_bytes,
)
from megatron_fsdp_adapter.quantized import format_of
from tests.lib.engine.engine_cases import Rig, build, units_of
from tests.lib.engine.pretended import pretended_world
from tests.lib.engine.small_model import Setup, make_net
from tests.lib.quantized.emulated import RECIPES, EmulatedTensor, Float8Tensor

CHECKS = (
    "quantized/params.py",
    "quantized/columns.py",
    "core/engine/quantized.py",
    "build/same_model.py",
)

# Guards.


def _field(param):
    return param._rowwise_data


def _dequantize(param):
    return param.dequantize()


def _sum(param):
    return param + 1


def _usage(param):
    return param.update_usage(rowwise_usage=True)


def _copy(param):
    return param.clone()


READS = {
    "field": _field,
    "dequantize": _dequantize,
    "sum": _sum,
    "usage": _usage,
    "copy": _copy,
}


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_reading_a_weight_that_is_not_there_names_it(two_ranks, strategy, read):
    """Kept weights, too, between a step and their gather."""
    rig = build(Setup(strategy, recipe="block128"))
    rig.step(sync=False)
    rig.engine.to_unsharded()
    with pytest.raises(RuntimeError, match=r"layers.1.up.weight of unit layers.1.*phase SHARDED"):
        READS[read](rig.model.layers[1].up.weight)


def test_what_says_nothing_about_values_can_be_read(two_ranks):
    rig = build(Setup(recipe="mxfp8"))
    rig.engine.to_unsharded()
    weight = rig.model.layers[1].up.weight
    assert weight.shape == (96, 32)
    assert weight.numel() == 96 * 32
    assert weight.is_leaf
    assert weight.dtype == torch.bfloat16
    assert weight.device == torch.device("cpu")
    assert weight.requires_grad
    assert weight.grad is None
    assert "layers.1.up.weight" in repr(weight)
    assert isinstance(weight, nn.Parameter)
    assert isinstance(weight, EmulatedTensor)


def test_in_forward_and_backward_a_weight_is_of_its_own_class(two_ranks):
    rig = build(Setup(recipe="current"))
    seen = []
    up = rig.model.layers[1].up
    up.register_forward_hook(lambda module, *_: seen.append(type(module.weight)))
    rig.loss().backward()
    assert seen == [Float8Tensor]
    assert type(up.weight) is not Float8Tensor, "and another one after it"
    classes = {
        type(p.unsharded) for p in rig.engine.pairs if isinstance(p.unsharded, EmulatedTensor)
    }
    assert len(classes) == 1, "one guard for all of a class"


# What is derived.


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_transposes_are_made_in_backward_and_dropped_behind_it(two_ranks, strategy, keep):
    if keep and STRATEGIES[strategy].shard_weights:
        with pytest.raises(ValueError, match="keep_derived=True with optim_grads_params"):
            Setup(strategy, recipe="current", keep_derived=True).config  # noqa: B018
        return
    rig = build(Setup(strategy, recipe="current", keep_derived=keep))
    rig.step()
    weight = next(
        p.unsharded for p in rig.engine.pairs if p.managed.fqns == ("layers.2.up.weight",)
    )
    seen = []

    def derived() -> bool:
        return weight.__dict__["_transpose"] is not None

    rig.model.layers[2].up.register_forward_hook(lambda *_: seen.append(derived()))
    rig.zero()
    rig.last(False)
    rig.loss().backward()
    assert derived() is keep, "not in forward"
    assert seen == [False], "not in forward"
    rig.last(True)
    rig.loss().backward()
    assert seen == [False, keep]
    rig.finish()
    rig.optimizer_step()
    assert not derived(), "of old weights"


# Bytes.


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_live_storages_are_those_of_the_formula(strategy, recipe, frozen):
    """With shards of quantized weights where their format keeps them."""
    with pretended_world(4, 2):
        rig = build(Setup(strategy, recipe=recipe, world=4, rank=2, layers=3, frozen=frozen))
        row = STRATEGIES[strategy]
        precision = Precision(state_bytes=0)
        by_group = [group_bytes(g.layout, row, precision, 2) for g in rig.engine.groups]
        rig.step(sync=False)
        rig.zero()
        rig.engine.gather.reshard_all()
        expected = sum(
            count
            for held in by_group
            for kind, count in held.items()
            if LIFE[kind] == PERSISTENT and kind != OPTIMIZER_STATE
        )
        assert live_bytes(rig) == expected
        if row.shard_weights:
            unit = rig.engine.units[1]
            rig.engine.to_unsharded()
            rig.engine.gather.unshard(unit)
            gathered = sum(held.get("gathered weights", 0) for held in by_unit(rig, unit, by_group))
            present = {u.name for u in rig.engine.units if u.phase is not Phase.SHARDED}
            for other in rig.engine.units:
                if other is not unit:
                    rig.engine.gather.reshard(other)
            assert live_bytes(rig) == expected + gathered, present


def by_unit(rig: Rig, unit: Any, by_group: list[dict[str, int]]) -> list[dict[str, int]]:
    return [by_group[rig.engine.groups.index(group)] for group in unit.groups]


def live_bytes(rig: Rig) -> int:
    """Of all flat buffers of all groups, each storage once."""
    found = {}
    for group in rig.engine.groups:
        flats = [buffer.tensor for buffer in (*group.weights.unsharded, *group.weights.sharded)]
        flats.append(group.main.buffer.tensor)
        if group.key.requires_grad:
            flats += [group.grads.main.tensor, group.grads.bucket.tensor]
        for flat in flats:
            found[flat.untyped_storage()._cdata] = storage_bytes(flat)
    return sum(found.values())


def test_autograd_keeps_the_parameter_and_no_copy_of_it(two_ranks, monkeypatch):
    """What backward reads of a weight is in the unit's buffers, which hooks are not shown."""
    monkeypatch.setattr(saved_tensors, "is_owned", lambda value: False)
    rig = build(Setup(recipe="current"))
    kept: list[torch.Tensor] = []

    def pack(value: torch.Tensor) -> torch.Tensor:
        kept.append(value)
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        rig.loss()
    weights = [value for value in kept if isinstance(value, EmulatedTensor)]
    assert len(weights) == 8
    raw = {id(pair.unsharded) for pair in rig.engine.pairs}
    assert all(id(value) in raw for value in weights)
    assert not [v for v in kept if v.shape[-2:] in ((96, 32), (32, 96)) and type(v) is torch.Tensor]


def test_ranks_compare_formats_and_buffers_say_which_plane_they_are(two_ranks):
    setup = Setup(recipe="mxfp8")
    model = make_net(setup)
    units = units_of(model)
    entries = [replace(one, format=format_of(one)) for one in managed_params(model, units)]
    plans = partition(units, entries)
    lines = [line for line in model_lines(plans, setup.config) if "layers.0.up" in line]
    assert any("up.weight (96, 32) bfloat16 as mxfp8 trained" in line for line in lines)
    assert any("up.bias (96,) bfloat16 trained" in line for line in lines)
    engine = build(setup).engine
    dtypes = {row["parameter"]: row["dtype"] for row in param_rows(engine)}
    assert dtypes["layers.0.up.weight"] == "bfloat16 as mxfp8"
    assert dtypes["layers.0.up.bias"] == "bfloat16"
    labels = {full.label for group in engine.groups for full in group.weights.unsharded}
    assert "the gathered weights (columnwise_scales) of unit layers.1" in labels
    assert "the gathered weights of unit layers.1" in labels
