"""What users of PyTorch do in their own training loops ends in the weights of an unsharded module
whose gradients are averaged over the ranks, and has the same bits where the optimizer is in host
memory or layers are compiled."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh

from megatron_fsdp_adapter.core.config import STRATEGIES
from tests.distributed.launch import run_ranks
from tests.distributed.plain import STEPS, Block, Side, device, net
from tests.distributed.plain_loops import LOOPS

WEIGHTS = 2e-5
"""Relative, of a weight tensor's norm after the steps of a loop."""

NEEDS_KEPT_WEIGHTS = ("a_rank_without_data",)
"""Where weights are sharded all ranks gather them in each forward."""

NEEDS_SHARDED_GRADS = ("an_optimizer_every_other_step", "gradients_replaced_between_backwards")
"""Several backwards outside of `no_sync`, or an optimizer's gradients kept for a later one."""

NEEDS_KEPT_GRADS = ("a_rank_without_microbatches",)
"""Where gradients are sharded all ranks reduce them in each backward."""

ALL_STRATEGIES = ("microbatches_and_clipping",)
"""Not only the one that shards most and one of the others."""


def strategies_of(name: str) -> list[str]:
    """Under which a loop can run."""
    return [
        strategy
        for strategy, row in STRATEGIES.items()
        if not (name in NEEDS_SHARDED_GRADS and not row.shard_grads)
        and not (name in NEEDS_KEPT_GRADS and row.shard_grads)
        and not (name in NEEDS_KEPT_WEIGHTS and row.shard_weights)
    ]


def check_loops(
    rank: int, world: int, names: Iterable[str], outer: int = 0, every: bool = True,
    **options: Any,
) -> None:
    """Every strategy against the unsharded side; without `every`, the one that shards most and one
    of the others, in turn. outer: the size of an outer axis, if there is to be one; options: of
    `fully_shard_model`."""
    if outer:
        options["mesh"] = init_device_mesh(
            device().type, (outer, world // outer), mesh_dim_names=("replicas", "shards")
        )
    problems = []
    for position, name in enumerate(names):
        reference = Side(rank, world, None)
        LOOPS[name](reference)
        expected = reference.weights()
        *others, most = strategies_of(name)
        in_turn = others[position % len(others) :][:1]
        for strategy in (*(others if every or name in ALL_STRATEGIES else in_turn), most):
            side = Side(rank, world, strategy, options)
            try:
                LOOPS[name](side)
            except Exception as error:  # told with the others, by name
                problems.append(f"{name}, {strategy}: {type(error).__name__}: {error}")
                continue
            problems += [f"{name}, {strategy}, {line}" for line in _differences(side, expected)]
            if side.numbers != pytest.approx(reference.numbers, rel=1e-5, abs=1e-7):
                problems.append(f"{name}, {strategy}: {side.numbers} != {reference.numbers}")
    assert not problems, "\n".join(problems)


def _differences(side: Side, expected: Mapping[str, torch.Tensor]) -> list[str]:
    found = side.weights()
    assert found.keys() == expected.keys()
    lines = []
    for name, value in expected.items():
        error = float((found[name] - value).norm() / value.norm())
        if not error <= WEIGHTS:
            lines.append(f"{name}: off by {error:.1e}")
    return lines[:3]


@pytest.mark.parametrize("every", (False, pytest.param(True, marks=pytest.mark.full)))
def test_loops_train_to_the_same_weights(every: bool) -> None:
    run_ranks(functools.partial(check_loops, every=every), 2, list(LOOPS), timeout=400)


def test_one_rank_trains_like_a_single_process() -> None:
    run_ranks(check_loops, 1, ALL_STRATEGIES)


@pytest.mark.full
def test_loops_on_three_ranks() -> None:
    names = ("a_rank_without_data", "clipped_by_norms", "some_gradients_taken_away")
    run_ranks(check_loops, 3, names, timeout=400)


def _outer(rank: int, world: int) -> None:
    names = ("a_rank_without_data", "a_rank_without_microbatches", *ALL_STRATEGIES)
    for strategy in ("no_shard", "optim"):
        check_loops(rank, world, names, outer=2, outer_dp_sharding_strategy=strategy)


def test_loops_with_an_outer_axis() -> None:
    """A rank without data meets the others in the order in which they reduce over either axis."""
    run_ranks(_outer, 4, timeout=400)


# The same bits.


def _bits(side: Side, name: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    LOOPS[name](side)
    return side.numbers, side.weights()


OFFLOADED = (
    "scheduled_clipped_and_written", "steps_that_raise", "state_changed_by_hand",
    "layers_frozen_in_turn",
)  # fmt: skip


def _offloaded(rank: int, world: int) -> None:
    for strategy in STRATEGIES:
        for name in OFFLOADED:
            sides = [
                Side(rank, world, strategy, {"chunked_optimizer_state_offload": on})
                for on in (False, True)
            ]
            for side in sides:
                side.dtype = torch.bfloat16
            (numbers, weights), (found, ours) = (_bits(side, name) for side in sides)
            assert found == numbers, (strategy, name)
            for key, value in weights.items():
                assert torch.equal(ours[key], value), (strategy, name, key)


def test_loops_have_the_same_bits_with_the_optimizer_in_host_memory() -> None:
    """A step that raised leaves nothing on the device."""
    run_ranks(_offloaded, 2, timeout=400)


def _compiled(layers: nn.Sequential, as_function: bool, again: bool = False, **how: Any) -> None:
    """Compiles each layer, in place or by one that stands in for it. again: layers that are
    computed again in backward."""
    for number, layer in enumerate(layers):
        if again:
            layers[number] = layer = checkpoint_wrapper(layer)
        if as_function:
            layers[number] = torch.compile(layer, backend="aot_eager", **how)  # type: ignore[assignment]
        else:
            layer.compile(backend="aot_eager", **how)


COMPILED: dict[str, tuple[bool, bool, dict[str, Any], dict[str, Any]]] = {
    "as torchtitan does": (True, False, {"fullgraph": True}, {}),
    "ZeRO-2": (True, False, {}, {"data_parallel_sharding_strategy": "optim_grads"}),
    "by a function": (True, True, {"fullgraph": True}, {}),
    "by a function, units inside": (True, True, {}, {"fsdp_unit_modules": [Block, nn.Embedding]}),
    "with recomputation": (True, False, {"again": True}, {}),
    "layers of one unit": (True, False, {}, {"fsdp_unit_modules": []}),
    "after wrapping": (False, False, {}, {}),
    "by a function after wrapping": (False, True, {}, {}),
    "the whole model": (True, True, {}, {}),
}
"""Whether before wrapping, whether by torch.compile(layer), its options and those of wrapping."""


def _trains_compiled(side: Side, name: str) -> tuple[list[float], list[torch.Tensor]]:
    """Losses and weights after steps of two microbatches and an evaluation; "" compiles nothing."""
    before, as_function, how, options = COMPILED.get(name, (False, False, {}, {}))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    module: Any = net()
    layers = module.blocks
    if "whole" in name:
        module = torch.compile(module, backend="aot_eager")
    elif before:
        _compiled(layers, as_function, **how)
    model = side.model(module, **{"fsdp_unit_modules": None, **options})
    if name and not before:
        _compiled(layers, as_function, **how)
    optimizer = side.optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    for step in range(STEPS - 1):
        with model.no_sync():
            side.loss(model, step, 0).backward()
        loss = side.loss(model, step, 1)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            side.numbers += [loss.item(), side.loss(model, step, 2).item()]
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert bool(name) == bool(graphs), "layers were compiled"
    return side.numbers, list(side.weights().values())


def _compiled_layers(rank: int, world: int) -> None:
    made = functools.partial(Side, rank, world, "optim_grads_params")
    losses, weights = _trains_compiled(made(), "")
    for name in COMPILED:
        found = _trains_compiled(made(), name)
        assert found[0] == losses, name
        assert all(map(torch.equal, found[1], weights)), name


def test_layers_that_are_compiled_train_to_the_same_bits() -> None:
    """Before or after wrapping, as a method or a function. What is gathered and reduced is outside
    of the graphs. aot_eager computes with the operations of an eager run."""
    run_ranks(_compiled_layers, 2, timeout=400)
