"""What users of PyTorch do in their own training loops ends in the weights of an unsharded module
whose gradients are averaged over the ranks, and has the same bits where the optimizer is in host
memory or layers are compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh

from megatron_fsdp_adapter.core.config import STRATEGIES, Strategy
from tests.lib.gpt.checks import check_same_bits, check_weights
from tests.lib.plain.late_gradients import LATE_LOOPS
from tests.lib.plain.plain import Block, Side, device, net
from tests.lib.plain.plain_loops import LOOPS
from tests.lib.ranks.shared_ranks import on_ranks

CHECKS = (
    "plain/user_loop.py",
    "plain/optimizer.py",
    "plain/optimizer_rows.py",
    "build/grad_sync.py",
    "core/engine/microbatches.py",
)

NEEDS: Mapping[str, Callable[[Strategy], bool]] = {
    # Where weights are sharded all ranks gather them in each forward.
    "a_rank_without_data": lambda row: not row.shard_weights,
    # Where gradients are sharded all ranks reduce them in each backward.
    "a_rank_without_microbatches": lambda row: not row.shard_grads,
    # Several backwards outside of `no_sync`, or an optimizer's gradients kept for a later one.
    "an_optimizer_every_other_step": lambda row: row.shard_grads,
    "gradients_replaced_between_backwards": lambda row: row.shard_grads,
    "hooks_of_what_a_backward_reaches": lambda row: row.shard_grads,
}
"""What a strategy has to be for a loop to run."""

ALL_STRATEGIES = ("microbatches_and_clipping",)
"""Not only the one that shards most and one of the others."""


def check_loops(
    rank: int,
    world: int,
    names: Iterable[str],
    outer: int = 0,
    every: bool = True,
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
        can = NEEDS.get(name, lambda row: True)
        *others, most = [strategy for strategy, row in STRATEGIES.items() if can(row)]
        in_turn = others[position % len(others) :][:1]
        for strategy in (*(others if every or name in ALL_STRATEGIES else in_turn), most):
            side = Side(rank, world, strategy, options)
            try:
                LOOPS[name](side)
                assert side.numbers == pytest.approx(reference.numbers, rel=1e-5, abs=1e-7)
                check_weights(side.weights(), expected, "after the loop", 2e-5)
            except Exception as error:  # reported with the others, by name
                problems.append(f"{name}, {strategy}: {type(error).__name__}: {error}")
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("every", (False, pytest.param(True, marks=pytest.mark.full)))
@on_ranks(2, seconds=400)
def test_loops_train_to_the_same_weights(rank: int, world: int, every: bool) -> None:
    check_loops(rank, world, LOOPS, every=every)


CLIPPED = [name for name in LOOPS if "clipped_by_norm" in name]


@pytest.mark.parametrize(
    ("world", "names"),
    [
        (1, (*ALL_STRATEGIES, *LATE_LOOPS)),  # a read of released memory is seen at once
        pytest.param(
            3,
            ("a_rank_without_data", "some_gradients_taken_away", *CLIPPED),
            marks=pytest.mark.full,
        ),
    ],
)
@on_ranks(seconds=400)
def test_loops_on_other_numbers_of_ranks(rank: int, world: int, names: tuple[str, ...]) -> None:
    check_loops(rank, world, names)


@pytest.mark.parametrize("strategy", ("no_shard", "optim"))
@on_ranks(4, seconds=400)
def test_loops_with_an_outer_axis(rank: int, world: int, strategy: str) -> None:
    """A rank without data meets the others in the order in which they reduce over either axis."""
    names = ("a_rank_without_data", "a_rank_without_microbatches", *ALL_STRATEGIES)
    check_loops(rank, world, names, outer=2, outer_dp_sharding_strategy=strategy)


# The same bits.

OFFLOADED = (
    "scheduled_and_clipped",
    "scaled_losses_and_a_fused_optimizer",
    "clamped",
    "steps_that_raise",
    "state_changed_by_hand",
    "layers_frozen_in_turn",
)


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2, seconds=400)
def test_loops_have_the_same_bits_with_the_optimizer_in_host_memory(
    rank: int, world: int, strategy: str
) -> None:
    """A step that raised leaves nothing on the device."""
    for name in OFFLOADED:
        stays, goes = (
            Side(rank, world, strategy, {"chunked_optimizer_state_offload": on}, torch.bfloat16)
            for on in (False, True)
        )
        for side in (stays, goes):
            LOOPS[name](side)
        assert goes.numbers == stays.numbers, name
        check_same_bits(goes.weights(), stays.weights(), name)


def _in_place(module: Any, again: bool = False, **how: Any) -> Any:
    """Compiles each layer. again: layers that are computed again in backward."""
    for number, layer in enumerate(module.blocks):
        if again:
            module.blocks[number] = layer = checkpoint_wrapper(layer)
        layer.compile(backend="aot_eager", **how)
    return module


def _by_function(module: Any, **how: Any) -> Any:
    """Puts what stands for a compiled layer in the place of each."""
    for number, layer in enumerate(module.blocks):
        module.blocks[number] = torch.compile(layer, backend="aot_eager", **how)
    return module


def _unchanged(module: Any) -> Any:
    return module


@dataclass
class Compiled(Side):
    """With something done to each module before it is wrapped, and after."""

    before: Callable[[Any], Any] = _unchanged
    after: Callable[[Any], Any] = _unchanged

    def model(self, module: nn.Module | None = None, **options: Any) -> Any:
        made = super().model(self.before(net()), **options)
        self.after(self.inner(made))
        return made


COMPILED: Mapping[str, tuple[Callable[[Any], Any], Callable[[Any], Any], dict[str, Any]]] = {
    "as torchtitan does": (partial(_in_place, fullgraph=True), _unchanged, {}),
    "ZeRO-2": (
        partial(_in_place, fullgraph=True),
        _unchanged,
        {"data_parallel_sharding_strategy": "optim_grads"},
    ),
    "by a function": (partial(_by_function, fullgraph=True), _unchanged, {}),
    "by a function, units inside": (
        _by_function,
        _unchanged,
        {"fsdp_unit_modules": [Block, nn.Embedding]},
    ),
    "with recomputation": (partial(_in_place, again=True), _unchanged, {}),
    "layers of one unit": (_in_place, _unchanged, {"fsdp_unit_modules": []}),
    "after wrapping": (_unchanged, _in_place, {}),
    "by a function after wrapping": (_unchanged, _by_function, {}),
    "the whole model": (partial(torch.compile, backend="aot_eager"), _unchanged, {}),
}
"""What is done before wrapping, and after, and options of wrapping."""


@on_ranks(2, seconds=400)
def test_layers_that_are_compiled_train_to_the_same_bits(rank: int, world: int) -> None:
    """Before or after wrapping, as a method or a function. What is gathered and reduced is outside
    of the graphs. aot_eager computes with the operations of an eager run."""
    eager = Compiled(rank, world, "optim_grads_params", {"fsdp_unit_modules": None})
    LOOPS["nested_no_sync"](eager)
    for name, (before, after, more) in COMPILED.items():
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        side = Compiled(
            rank, world, eager.strategy, {**eager.options, **more}, before=before, after=after
        )
        LOOPS["nested_no_sync"](side)
        assert side.numbers == eager.numbers, name
        both = (dict(enumerate(one.weights().values())) for one in (side, eager))
        check_same_bits(*both, name)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"], "layers were compiled"
