"""Show 1: strategy x dtypes x microbatches x world, pairwise, against float64 within derived
bounds; and the mistakes of other engines, put back one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_fsdp_adapter.core.engine.group import GradState, ParamGroup
from megatron_fsdp_adapter.core.engine.identity import ParamPair
from megatron_fsdp_adapter.core.engine.reduce import ReducePipeline
from megatron_fsdp_adapter.core.engine.reduction import Reduction
from tests.distributed.checks import passes
from tests.distributed.launch import run_ranks
from tests.distributed.precision import (
    BF16,
    FACTORS,
    FP32,
    UNIT,
    Cell,
    build,
    check_cell,
    over_two_axes,
    pairs_of,
    pairwise,
    with_fp32_accumulation,
)

pytestmark = pytest.mark.once

CELLS = [*pairwise(), *with_fp32_accumulation(), *over_two_axes()]


def test_every_pair_of_values_is_in_the_matrix() -> None:
    rows = [tuple(getattr(cell, name) for name in list(vars(cell))[:7]) for cell in CELLS]
    covered = set().union(*(pairs_of(row) for row in rows))
    for a, first in enumerate(FACTORS):
        for b in range(a + 1, len(FACTORS)):
            assert {(a, x, b, y) for x in first for y in FACTORS[b]} <= covered
    assert len(CELLS) < 40


def _matrix(rank: int, world: int, cells: Sequence[Cell]) -> dict[str, float]:
    errors = {}
    for cell in cells:
        if cell.loses_bits:
            with pytest.raises(ValueError, match="which has more bits"):
                build(cell)
        else:
            errors[str(cell)] = check_cell(cell, rank)
    return errors


@pytest.mark.parametrize("world", (1, 2, pytest.param(4, marks=pytest.mark.full)))
def test_gradients_and_updates_in_every_mixture(world: int) -> None:
    """Two steps each: gradients within the bounds of their dtypes, and updates bit for bit those of
    whole tensors. Where something travels or is summed in bf16, the error is more than float32's:
    the dtypes are really used."""
    cells = [cell for cell in CELLS if cell.world == world]
    errors = run_ranks(_matrix, world, cells)[0]
    for cell in cells:
        if cell.loses_bits:
            continue
        sums_in_bf16 = cell.policy.grads_dtype == BF16 and cell.microbatches > 1
        adds_on_the_wire = world // cell.outer > 2 or cell.params != BF16 or cell.microbatches > 1
        wire_in_bf16 = cell.policy.comm_dtype == BF16 and world > 1 and adds_on_the_wire
        if sums_in_bf16 or (wire_in_bf16 and not cell.fp32_accumulation):
            assert errors[str(cell)] > 16 * UNIT[FP32], cell


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


@contextmanager
def _fault(name: str) -> Iterator[None]:
    owner, method, instead, _ = FAULTS[name]
    with mock.patch.object(owner, method, instead):
        yield


def _with_fault(rank: int, world: int, name: str) -> tuple[bool, bool]:
    """Whether the check of the fault's cell passes without it, and with it."""
    cell = FAULTS[name][3]
    sound = passes(check_cell, cell, rank)
    with _fault(name):
        return sound, passes(check_cell, cell, rank)


@pytest.mark.parametrize("name", FAULTS)
def test_a_mistake_put_back_is_seen(name: str) -> None:
    assert run_ranks(_with_fault, FAULTS[name][3].world, name)[0] == (True, False)
