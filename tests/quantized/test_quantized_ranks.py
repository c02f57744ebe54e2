"""Training with quantized weights on gloo ranks equals one unsharded process, bit for bit: main
weights, bytes and scales after every step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_fsdp_adapter.core.config import STRATEGIES
from megatron_fsdp_adapter.core.runtime.comm import Communicator
from megatron_fsdp_adapter.core.runtime.device import HostRuntime
from tests.distributed.launch import run_ranks
from tests.engine.engine_cases import Rig, Setup, build
from tests.quantized.emulated import RECIPES, EmulatedTensor, field_of, whole_fields
from tests.quantized.quantized_cases import PlainQuantizedRig

CPU = torch.device("cpu")


def made(setup: Setup) -> Rig:
    return build(setup, HostRuntime(), lambda group, *_: Communicator(group, CPU))


def forward_backward(rig: Rig, rank: int, microbatches: int, first: int) -> None:
    quantizers = [p._quantizer for u in rig.engine.units for p in u.quantized]
    for index in range(first, first + microbatches):
        rig.last(index == first + microbatches - 1)
        rig.loss(index + 100 * rank).backward()
        for quantizer in quantizers:
            quantizer.roll()


def whole_mains(rig: Rig) -> dict[str, torch.Tensor]:
    """Main weights of all ranks that share them, put together. With a domain of its own a weight
    has other values in the ranks outside."""
    rig.engine.to_sharded()
    own = []
    for pair in rig.engine.pairs:
        rows = pair.group.held.layout.shard_range(pair.index, pair.group.held.rank)
        local = pair.sharded._local_tensor.detach().float().reshape(-1)  # type: ignore[attr-defined]
        own.append((pair.managed.fqns[0], rows.start, local))
    sharing = {
        pair.managed.fqns[0]: rig.engine.gather.communicators[pair.group.key.domain].ranks
        for pair in rig.engine.pairs if rig.setup.split
    }  # fmt: skip
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    found = {pair.managed.fqns[0]: torch.empty(pair.unsharded.shape) for pair in rig.engine.pairs}
    for rank, pieces in enumerate(every):
        for name, start, values in pieces:
            if rank not in sharing.get(name, range(len(every))):
                continue
            found[name].view(-1)[start : start + values.numel()] = values
    return found


def gathered_fields(rig: Rig) -> dict[str, torch.Tensor]:
    """Every plane and scale of every quantized parameter, while its unit is gathered."""
    found = {}
    rig.engine.to_unsharded()
    for unit in rig.engine.units:
        rig.engine.gather.need(unit)
        for group in unit.groups:
            for entry in group.managed if group.key.quantized else ():
                name, param = entry.fqns[0], entry.param
                tensors = {**rig.quantized.fields(param)}
                tensors |= {f"scale {i}": s for i, s in enumerate(rig.quantized.scales(param))}
                found |= {f"{name}:{field}": value.clone() for field, value in tensors.items()}
        rig.engine.gather.release(unit)
    return found


def compare(rig: Rig, plain: PlainQuantizedRig, when: Any) -> None:
    mains, expected = whole_mains(rig), plain.weights()
    assert mains.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(mains[name], value), (when, name)
    fields = gathered_fields(rig)
    quantized = {n: p for n, p in plain.params.items() if isinstance(p, EmulatedTensor)}
    names = {key.rsplit(":", 1)[0] for key in fields}
    assert names == quantized.keys() != set()
    for name, param in quantized.items():
        for field, value in rig.quantized.fields(param).items():
            assert torch.equal(fields[f"{name}:{field}"], value), (when, name, field)
        for index, value in enumerate(rig.quantized.scales(param)):
            assert torch.equal(fields[f"{name}:scale {index}"], value), (when, name, "scale")


def train(setup: Setup, rank: int, when: Any) -> None:
    """Steps of two microbatches; evaluations in the middle of one and after another; a load; a
    step that is skipped."""
    ranks, row = setup.world, STRATEGIES[setup.strategy]
    rig, plain = made(setup), PlainQuantizedRig(setup, ranks, separately=row.shard_grads)
    compare(rig, plain, (*when, "wrapped"))
    for step in range(5):
        rig.zero()
        plain.zero()
        forward_backward(rig, rank, 2, 2 * step)
        plain.forward_backward(2, 2 * step)
        if step == 1:
            assert torch.equal(rig.evaluate(), plain.evaluate()), (*when, "in the middle")
        rig.finish()
        if step != 3:
            rig.optimizer_step()
            plain.optimizer_step()
        if step == 2:
            rig.load()
            plain.load()
        rig.sync(wait=step % 2 == 1)
        assert torch.equal(rig.evaluate(), plain.evaluate()), (*when, step)
        compare(rig, plain, (*when, step))


def _train(rank: int, world: int, recipes: list[str], options: Mapping[str, Any]) -> None:
    for recipe in recipes:
        for strategy in STRATEGIES:
            setup = Setup(strategy, world, rank, recipe=recipe, layers=2, **options)
            train(setup, rank, (recipe, strategy))


@pytest.mark.parametrize(
    "recipe",
    [pytest.param(one, marks=pytest.mark.full if one == "block128" else ()) for one in RECIPES],
)
def test_two_ranks_train_as_one_process(recipe):
    run_ranks(_train, 2, [recipe], {}, timeout=600)


@pytest.mark.full
def test_one_rank_trains_as_one_process():
    run_ranks(_train, 1, list(RECIPES), {}, timeout=600)


OPTIONS: dict[str, dict[str, Any]] = {
    "tied": {"tied": True},
    "frozen": {"frozen": True},
    "recompute": {"recompute": "non_reentrant"},
    "selective": {"recompute": "selective"},
    "slots": {"slots": True},
    "no overlap": {"overlap": False},
    "transposes kept": {"keep_derived": True},
}


RARE = ("no overlap", "transposes kept", "selective", "slots")
PAIRS = (
    ("optim_grads", "current"), ("optim_grads_params", "delayed"), ("optim_grads_params", "mxfp8"),
)  # fmt: skip


@pytest.mark.parametrize(
    "option", [pytest.param(o, marks=pytest.mark.full if o in RARE else ()) for o in OPTIONS]
)
def test_two_ranks_train_as_one_process_with_options(option):
    run_ranks(_options, 2, OPTIONS[option], timeout=600)


def _options(rank: int, world: int, options: Mapping[str, Any]) -> None:
    for strategy, recipe in PAIRS:
        if not (options.get("keep_derived") and STRATEGIES[strategy].shard_weights):
            setup = Setup(strategy, world, rank, recipe=recipe, layers=3, **options)
            train(setup, rank, (recipe, strategy, options))


def _bytes_are_of_mains(rank: int, world: int, options: Mapping[str, Any]) -> None:
    """More ranks add up in an order of their own: bytes are compared with those of the main
    weights, which all ranks put together."""
    for recipe in RECIPES:
        for strategy in STRATEGIES:
            rig = made(Setup(strategy, world, rank, recipe=recipe, layers=3, **options))
            for step in range(3):
                rig.zero()
                forward_backward(rig, rank, 2, 2 * step)
                rig.finish()
                rig.optimizer_step()
                before = {id(p): p._quantizer.scale for u in rig.engine.units for p in u.quantized}
                mains, fields = whole_mains(rig), gathered_fields(rig)
                for unit in rig.engine.units:
                    for group in unit.groups:
                        for entry in group.managed if group.key.quantized else ():
                            name, param = entry.fqns[0], entry.param
                            quantizer = type(param._quantizer)(recipe, scale=before[id(param)])
                            expected = whole_fields(mains[name], quantizer, param.dtype)
                            data = fields[f"{name}:rowwise"]
                            rows = expected[field_of(recipe, "rowwise")]
                            assert torch.equal(data, rows), (recipe, name)


OVER_FOUR: dict[str, dict[str, Any]] = {
    "one axis": {},
    "two domains": {"split": True},
    "two instances": {"outer": 2},
    "instances that hold parts": {"outer": 2, "shard_outer": True},
}


@pytest.mark.full
@pytest.mark.parametrize("axes", OVER_FOUR)
def test_bytes_over_four_ranks_are_those_of_the_main_weights(axes):
    run_ranks(_bytes_are_of_mains, 4, OVER_FOUR[axes], timeout=900)


def test_bytes_of_instances_that_hold_parts_are_those_of_the_main_weights():
    """The outer axis has the ranks of one shard."""
    run_ranks(_bytes_are_of_mains, 2, {"outer": 2, "shard_outer": True}, timeout=600)
