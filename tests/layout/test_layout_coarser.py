"""Larger shards made of consecutive ones, for a buffer that is split over two axes."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from layout_cases import divisors, layouts

from megatron_fsdp_adapter.core.layout import GroupLayout
from megatron_fsdp_adapter.core.layout.ranges import EMPTY


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
