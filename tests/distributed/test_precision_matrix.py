"""Show 1: strategy x dtypes x microbatches x world, pairwise, against float64 within derived
bounds; and the mistakes of other engines, put back one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_fsdp_adapter.core.engine.group import GradState, ParamGroup
from megatron_fsdp_adapter.core.engine.identity import ParamPair
from megatron_fsdp_adapter.core.engine.reduce import ReducePipeline
from megatron_fsdp_adapter.core.engine.reduction import Reduction
from tests.distributed.checks import passes
from tests.distributed.precision import (
    BF16,
    FP32,
    SPACE,
    UNIT,
    Cell,
    build,
    check_cell,
    over_two_axes,
    pairwise,
    with_fp32_accumulation,
)
from tests.distributed.shared_ranks import on_ranks
from tests.matrix.cover import covered

CELLS = [*pairwise(), *with_fp32_accumulation(), *over_two_axes()]


def test_every_pair_of_values_is_in_the_matrix() -> None:
    assert set(SPACE.possible_pairs) <= covered([vars(cell) for cell in CELLS], SPACE)
    assert len(CELLS) < 40


@pytest.mark.parametrize(
    ("cell", "world"),
    [
        pytest.param(
            cell, cell.world, id=str(cell), marks=[pytest.mark.full] if cell.world == 4 else []
        )
        for cell in CELLS
    ],
)
@on_ranks()
def test_gradients_and_updates_in_every_mixture(rank: int, world: int, cell: Cell) -> None:
    """Two steps each: gradients within the bounds of their dtypes, and updates bit for bit those of
    whole tensors. Where something travels or is summed in bf16, the error is more than float32's:
    the dtypes are really used."""
    if cell.loses_bits:
        with pytest.raises(ValueError, match="which has more bits"):
            build(cell)
        return
    error = check_cell(cell, rank)
    sums_in_bf16 = cell.policy.grads_dtype == BF16 and cell.microbatches > 1
    adds_on_the_wire = world // cell.outer > 2 or cell.params != BF16 or cell.microbatches > 1
    wire_in_bf16 = cell.policy.comm_dtype == BF16 and world > 1 and adds_on_the_wire
    if sums_in_bf16 or (wire_in_bf16 and not cell.fp32_accumulation):
        assert error > 16 * UNIT[FP32]


# Mistakes of other engines (the numbers are those of the list of traps).


def _on_running_sum(self: Any) -> None:
    """G1: the scale goes onto the gradient shard, once for each microbatch."""
    for shard, result in zip(self.group.grad_segments, self.results, strict=True):
        if self.group.has_transient_bucket:
            shard.add_(result) if self.adds else shard.copy_(result)
        shard.mul_(self.group.domain.grad_scale)


def _not_attached(self: ParamPair) -> None:
    """G4: an inverted condition, so that unsharded gradients never reach the optimizer."""
    if self.group.config.strategy.shard_main:
        self.optimizer.grad = self.grad


def _overwrites(original: Callable[..., None]) -> Callable[..., None]:
    """G5: kept gradients are replaced by those of the last microbatch."""
    return lambda self, accumulate: original(self, accumulate=False)


def _every_microbatch(original: Callable[..., None]) -> Callable[..., None]:
    """G5: kept gradients are reduced after each microbatch, the sum so far again each time."""

    def backward_done(self: Any, unit: Any, is_last: bool, *more: Any) -> None:
        reduced = [g for g in unit.trainable_groups if g.grad_state is GradState.REDUCED]
        for group in reduced:
            group.grad_state = GradState.ACCUMULATED
        original(self, unit, True, *more)
        self.finish()

    return backward_done


def _added_to_itself(original: Callable[..., None]) -> Callable[..., None]:
    """G8: with one rank what is added to the gradient shard is the shard."""

    def finish(self: Any) -> None:
        original(self)
        if self.group.domain.axis.size == 1 and self.adds:
            torch._foreach_add_(self.group.grad_segments, self.group.grad_segments)

    return finish


FAULTS: dict[str, tuple[type, str, Any, Cell]] = {
    "G1, the scale goes onto the running sum": (
        Reduction, "finish", _on_running_sum, Cell("optim_grads", microbatches=4)
    ),
    "G4, gradients of no_shard are not attached": (
        ParamPair, "attach_grad", _not_attached, Cell("no_shard")
    ),
    "G5, microbatches overwrite each other": (
        ParamGroup, "take_grads", _overwrites(ParamGroup.take_grads), Cell("optim", microbatches=4)
    ),
    "G5, ZeRO-1 reduces its running sum each microbatch": (
        ReducePipeline, "backward_done", _every_microbatch(ReducePipeline.backward_done),
        Cell("optim", microbatches=4),
    ),
    "G8, one rank doubles its gradients": (
        Reduction, "finish", _added_to_itself(Reduction.finish),
        Cell("optim_grads_params", microbatches=4, world=1),
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "world"), [(name, fault[3].world) for name, fault in FAULTS.items()]
)
@on_ranks()
def test_a_mistake_put_back_is_seen(rank: int, world: int, name: str) -> None:
    """And nothing without it."""
    owner, method, instead, cell = FAULTS[name]
    check_cell(cell, rank)
    with mock.patch.object(owner, method, instead):
        assert not passes(check_cell, cell, rank)
