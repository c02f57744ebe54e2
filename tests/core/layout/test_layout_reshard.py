"""Checkpoint blocks of shards; and larger shards made of consecutive ones, for a buffer that is
split over two axes."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given

from megatron_fsdp_adapter.core.dtensor.chunks import LayoutRef
from megatron_fsdp_adapter.core.layout import GroupLayout
from megatron_fsdp_adapter.core.layout.ranges import EMPTY
from tests.lib.layout.layout_cases import divisors, in_shard, layouts, scatter

CHECKS = ("core/layout/ranges.py", "core/layout/group.py", "core/dtensor/chunks.py")


@given(layouts())
def test_chunks_of_all_ranks_tile_the_parameter_with_what_each_holds(layout: GroupLayout) -> None:
    """Of a model-parallel slice, at its place in the whole tensor."""
    items = [np.arange(spec.numel) for spec in layout.specs]
    shards = scatter(layout, items)
    for index, spec in enumerate(layout.specs):
        whole = items[index].reshape(spec.layout_shape)
        seen = np.zeros(spec.layout_shape, int)
        origin = tuple(range(7, 7 + seen.ndim))
        for rank in range(layout.num_shards):
            blocks = [
                tuple(slice(o - p, o - p + s) for o, s, p in zip(*block, origin, strict=True))
                for block in LayoutRef(layout, index, rank, origin).chunks()
            ]
            where = in_shard(layout, index, rank)
            assert bool(blocks) == bool(where.numel)
            assert len(blocks) <= (1 if spec.whole_rows else 2 * seen.ndim - 1)
            found = np.concatenate([whole[block].ravel() for block in blocks] or [[]])
            assert (found == shards[rank][where.start : where.stop]).all()
            for block in blocks:
                seen[block] += 1
        assert (seen == 1).all()


@given(layout=layouts())
def test_a_larger_shard_holds_what_its_parts_hold(layout: GroupLayout) -> None:
    """Of every item, in the same order, for every number of shards that divides the finest."""
    for number in divisors(layout.num_shards):
        coarse = layout.with_shards(number)
        parts = layout.num_shards // number
        assert coarse.specs == layout.specs
        assert coarse.placements == layout.placements
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
                assert joined.start == pieces[0].start
                assert joined.stop == pieces[-1].stop
                assert all(a.stop == b.start for a, b in pairwise(pieces))
