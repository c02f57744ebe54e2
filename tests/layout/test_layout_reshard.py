"""Checkpoint blocks of shards, and copies between two layouts of the same parameters."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from layout_cases import (
    ALIGNMENTS,
    LARGEST_BUFFER,
    SHARDS,
    any_specs,
    layouts,
    scatter,
    specs_of,
)

from megatron_fsdp_adapter.checkpoint.reshard import chunks, transfers
from megatron_fsdp_adapter.layout import GroupLayout, plan_group


@given(layouts())
def test_chunks_of_all_ranks_tile_the_parameter(layout: GroupLayout) -> None:
    for index, spec in enumerate(layout.specs):
        seen = np.zeros(spec.layout_shape, dtype=int)
        for rank in range(layout.num_shards):
            blocks = chunks(layout, index, rank)
            numel = sum(math.prod(sizes) for _, sizes in blocks)
            assert numel == layout.shard_range(index, rank).numel
            assert len(blocks) <= (1 if spec.whole_rows else 2 * seen.ndim - 1)
            for offsets, sizes in blocks:
                seen[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))] += 1
        assert (seen == 1).all()


@given(layouts())
def test_chunks_address_the_elements_that_the_rank_holds(layout: GroupLayout) -> None:
    items = [np.arange(spec.numel) for spec in layout.specs]
    shards = scatter(layout, items)
    for index, spec in enumerate(layout.specs):
        whole = items[index].reshape(spec.layout_shape)
        for rank in layout.holders(index):
            where = layout.shard_item_range(index, rank)
            blocks = [
                whole[tuple(slice(o, o + s) for o, s in zip(*block, strict=True))].ravel()
                for block in chunks(layout, index, rank)
            ]
            assert (np.concatenate(blocks) == shards[rank][where.start : where.stop]).all()


def test_chunks_of_a_model_parallel_slice() -> None:
    layout = plan_group(specs_of([(16, 4), (5,)]), 2)
    rows = [chunks(layout, 0, rank, tp_offset=(16, 0)) for rank in range(2)]
    sizes = [layout.local_shape(0, rank) for rank in range(2)]
    assert rows == [(((16, 0), sizes[0]),), (((16 + sizes[0][0], 0), sizes[1]),)]
    assert chunks(layout, 1, layout.holders(1)[0], (100,))[0][0] == (100,)
    with pytest.raises(ValueError, match="tp_offset"):
        chunks(layout, 0, 0, (16,))


def test_an_empty_shard_has_no_chunk() -> None:
    layout = plan_group(specs_of([(2, 16)]), 4)
    assert [len(chunks(layout, 0, rank)) for rank in range(4)] == [1, 1, 0, 0]


def apply(moves, shards: list[np.ndarray], dst: GroupLayout) -> list[np.ndarray]:
    moved = [np.full(dst.shard_numel, -1) for _ in range(dst.num_shards)]
    for move in moves:
        target = moved[move.dst_rank][move.dst_offset : move.dst_offset + move.numel]
        assert move.numel > 0 and (target == -1).all()
        target[:] = shards[move.src_rank][move.src_offset : move.src_offset + move.numel]
    return moved


@given(any_specs(), SHARDS, SHARDS, ALIGNMENTS, ALIGNMENTS, st.integers(1, 4))
def test_transfers_there_and_back_are_the_identity(
    specs: list, here: int, there: int, align: int, other_align: int, max_segments: int
) -> None:
    src = plan_group(specs, here, align=align)
    dst = plan_group(specs, there, align=other_align, max_segments=max_segments)
    assume(max(src.total_numel, dst.total_numel) <= LARGEST_BUFFER)
    rng = np.random.default_rng()
    items = [rng.integers(0, 1 << 40, spec.numel) for spec in specs]
    forth, back = transfers(src, dst), transfers(dst, src)
    assert list(forth) == sorted(forth)
    assert sum(move.numel for move in forth) == src.item_numel
    moved = apply(forth, scatter(src, items), dst)
    expected = scatter(dst, items)
    assert all((a == b).all() for a, b in zip(moved, expected, strict=True))
    returned = apply(back, moved, src)
    assert all((a == b).all() for a, b in zip(returned, scatter(src, items), strict=True))


def test_a_transfer_to_the_same_layout_stays_on_its_rank() -> None:
    layout = plan_group(specs_of([(64, 32), (32,), (64, 48)]), 4)
    for move in transfers(layout, layout):
        assert (move.src_rank, move.src_offset) == (move.dst_rank, move.dst_offset)


def test_layouts_of_other_parameters_are_refused() -> None:
    one, two = plan_group(specs_of([(8, 4)]), 2), plan_group(specs_of([(4, 8)]), 2)
    with pytest.raises(ValueError, match="p0 has shape"):
        transfers(one, two)
    with pytest.raises(ValueError, match="1 and 2 parameters"):
        transfers(one, plan_group(specs_of([(8, 4), (8,)]), 2))


def test_moves_cost_the_sum_of_the_pieces_and_not_their_product() -> None:
    specs = specs_of([(4096, 16)])
    src, dst = plan_group(specs, 1024), plan_group(specs, 512)
    pairs = [(move.src_rank, move.dst_rank) for move in transfers(src, dst)]
    assert pairs == [(r, r // 2) for r in range(1024)] and len(set(pairs)) == 1024
    assert list(itertools.chain.from_iterable(pairs))[:4] == [0, 0, 1, 0]
