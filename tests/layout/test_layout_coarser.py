"""Larger shards made of consecutive ones, for a buffer that is split over two axes."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from layout_cases import divisors, layouts, specs_of

from megatron_fsdp_adapter.core.layout import GroupLayout, plan_group
from megatron_fsdp_adapter.core.layout.ranges import EMPTY, split_evenly


@given(layout=layouts())
def test_a_larger_shard_holds_what_its_parts_hold(layout: GroupLayout) -> None:
    """Of every item, in the same order, for every number of shards that divides the finest."""
    for number in divisors(layout.num_shards):
        coarse, parts = layout.with_shards(number), layout.num_shards // number
        assert (coarse.specs, coarse.placements) == (layout.specs, layout.placements)
        assert coarse.shard_numel == parts * layout.shard_numel
        for rank in range(number):
            for index in range(len(layout.specs)):
                pieces = [
                    piece
                    for part in range(parts)
                    if not (piece := layout.shard_range(index, rank * parts + part)).empty
                ]
                joined = coarse.shard_range(index, rank)
                if not pieces:
                    assert joined == EMPTY
                    continue
                assert (joined.start, joined.stop) == (pieces[0].start, pieces[-1].stop)
                assert all(a.stop == b.start for a, b in pairwise(pieces))


@given(layout=layouts())
def test_parts_of_a_shard_lie_where_a_nested_split_puts_them(layout: GroupLayout) -> None:
    for number in divisors(layout.num_shards):
        parts = layout.num_shards // number
        for rank in range(layout.num_shards):
            inner, outer = divmod(rank, parts)
            for segment, (held, _) in zip(
                layout.segments, layout.segment_shards(rank), strict=True
            ):
                coarse = split_evenly(segment.range, number, inner)
                assert held == split_evenly(coarse, parts, outer)


@pytest.mark.parametrize("number", [0, -1, 3, 5, 8])
def test_shards_that_do_not_divide_are_refused(number: int) -> None:
    layout = plan_group(specs_of([(16, 4)]), 4)
    with pytest.raises(ValueError, match=f"4 shards do not make {number} larger ones"):
        layout.with_shards(number)
