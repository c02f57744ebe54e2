"""Strategy x dtypes x microbatches x world, pairwise, against float64 within derived bounds."""

from __future__ import annotations

import pytest

from tests.lib.gpt.precision import (
    BF16,
    FP32,
    OVER_TWO_AXES,
    UNIT,
    WITH_FP32_ACCUMULATION,
    Cell,
    check_cell,
    pairwise,
)
from tests.lib.ranks.shared_ranks import on_ranks

CHECKS = ("core/config.py", "core/engine/reduce.py", "core/engine/group.py")

CELLS = []
for cell in (*pairwise(), *WITH_FP32_ACCUMULATION, *OVER_TWO_AXES):
    marks = [pytest.mark.full] if cell.world == 4 else []
    CELLS.append(pytest.param(cell, cell.world, id=str(cell), marks=marks))


@pytest.mark.parametrize(("cell", "world"), CELLS)
@on_ranks()
def test_gradients_and_updates_in_every_mixture(rank: int, world: int, cell: Cell) -> None:
    """Two steps each: gradients within the bounds of their dtypes, and updates bit for bit those of
    whole tensors. Where something travels or is summed in bf16, the error is more than float32's:
    the dtypes are really used."""
    error = check_cell(cell, rank)
    sums_in_bf16 = cell.policy.grads_dtype == BF16 and cell.microbatches > 1
    adds_on_the_wire = world // cell.outer > 2 or cell.params != BF16 or cell.microbatches > 1
    wire_in_bf16 = cell.policy.comm_dtype == BF16 and world > 1 and adds_on_the_wire
    if sums_in_bf16 or (wire_in_bf16 and not cell.fp32_accumulation):
        assert error > 16 * UNIT[FP32]
