"""Kernels that cast a part of a weight in 128 x 128 blocks store strips of 16 rows whole: no shard
that the planner cuts lets them write outside."""

from __future__ import annotations

import pytest
import torch

from megatron_fsdp_adapter.core.layout import (
    BLOCK128,
    FlatRange,
    ParamSpec,
    plan_group,
)
from tests.quantized.test_formats import planned, some_weights

STRIP = 16


def written_outside(shape: tuple[int, int], held: FlatRange) -> int:
    """Elements outside `held` that are stored by the warps of 16 rows x 128 columns that hold any
    element of it. A warp knows its rows, and takes all columns of those that are in the weight."""
    rows, columns = shape
    outside = 0
    for first in range(0, rows, STRIP):
        strip = FlatRange(first * columns, min(first + STRIP, rows) * columns)
        common = strip.intersect(held)
        if not common.empty:
            outside += strip.numel - common.numel
    return outside


@pytest.mark.parametrize("shards", [1, 2, 3, 4, 7, 8, 64])
def test_no_cut_of_the_planner_lets_a_strip_be_written_outside(shards):
    for seed in range(30):
        shapes = [(value.shape[0], value.shape[1]) for value in some_weights(seed)]
        shapes += [(40, 96), (7, 64)]
        layout = planned(shapes, BLOCK128, shards)
        for index, shape in enumerate(shapes):
            for rank in layout.holders(index):
                assert written_outside(shape, layout.shard_range(index, rank)) == 0


def test_the_granule_is_a_strip():
    spec = ParamSpec(0, ("w",), (64, 32), torch.bfloat16, True, 16 * 32, BLOCK128)
    assert BLOCK128.rows == STRIP and plan_group([spec], 2).segments[0].granularity == 16 * 32
