"""Checkpoint blocks of shards."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from layout_cases import in_shard, layouts, scatter, specs_of

from megatron_fsdp_adapter.checkpoint.chunks import LayoutRef
from megatron_fsdp_adapter.core.layout import GroupLayout, plan_group


@given(layouts())
def test_chunks_of_all_ranks_tile_the_parameter_with_what_each_holds(layout: GroupLayout) -> None:
    items = [np.arange(spec.numel) for spec in layout.specs]
    shards = scatter(layout, items)
    for index, spec in enumerate(layout.specs):
        whole, seen = items[index].reshape(spec.layout_shape), np.zeros(spec.layout_shape, int)
        for rank in range(layout.num_shards):
            blocks = [
                tuple(slice(o, o + s) for o, s in zip(*block, strict=True))
                for block in LayoutRef(layout, index, rank).chunks()
            ]
            assert len(blocks) <= (1 if spec.whole_rows else 2 * seen.ndim - 1)
            where = in_shard(layout, index, rank)
            found = np.concatenate([whole[block].ravel() for block in blocks] or [[]])
            assert (found == shards[rank][where.start : where.stop]).all()
            for block in blocks:
                seen[block] += 1
        assert (seen == 1).all()


def test_chunks_of_a_model_parallel_slice() -> None:
    layout = plan_group(specs_of([(16, 4), (5,)]), 2)
    rows = [LayoutRef(layout, 0, rank, (16, 0)).chunks() for rank in range(2)]
    sizes = [layout.local_shape(0, rank) for rank in range(2)]
    assert rows == [(((16, 0), sizes[0]),), (((16 + sizes[0][0], 0), sizes[1]),)]
    assert LayoutRef(layout, 1, layout.holders(1)[0], (100,)).chunks()[0][0] == (100,)


def test_an_empty_shard_has_no_chunk() -> None:
    layout = plan_group(specs_of([(2, 16)]), 4)
    assert [len(LayoutRef(layout, 0, rank).chunks()) for rank in range(4)] == [1, 1, 0, 0]
