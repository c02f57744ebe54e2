"""What a shard is in its tensor's own axes, and what moves where between two layouts.

Both are pure functions of layouts, hence equal on every rank: a checkpoint needs no collective
to find out who writes which block, nor a reshard who sends what.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_fsdp_adapter.layout.group import GroupLayout
from megatron_fsdp_adapter.layout.ranges import Box, FlatRange, flat_range_to_boxes


@dataclass(frozen=True, order=True)
class Transfer:
    """`numel` elements of item number `item` go from one rank's shard buffer to another's.

    src_offset and dst_offset are elements from the start of the flat shard buffers.
    """

    item: int
    src_rank: int
    src_offset: int
    dst_rank: int
    dst_offset: int
    numel: int


def chunks(
    layout: GroupLayout, index: int, rank: int, tp_offset: tuple[int, ...] | None = None
) -> tuple[Box, ...]:
    """The blocks (offsets, sizes) of parameter `index` that `rank` holds, in flat order.

    One block of rows for whole-row granules, at most 2d-1 blocks for d dimensions otherwise,
    none for an empty shard. `tp_offset` (one number per dimension) is added to the offsets: where
    this model-parallel slice starts in the global tensor. A 0-D parameter has shape (1,) here.
    Raises ValueError if tp_offset has another number of dimensions.
    """
    shape = layout.specs[index].layout_shape
    boxes = flat_range_to_boxes(layout.shard_range(index, rank), shape)
    if tp_offset is None:
        return boxes
    if len(tp_offset) != len(shape):
        raise ValueError(
            f"{layout.specs[index].fqns[0]}: tp_offset {tp_offset} has {len(tp_offset)} "
            f"dimensions, the parameter {len(shape)}"
        )
    return tuple(
        (tuple(a + b for a, b in zip(offsets, tp_offset, strict=True)), sizes)
        for offsets, sizes in boxes
    )


def transfers(src: GroupLayout, dst: GroupLayout) -> tuple[Transfer, ...]:
    """Every copy that turns shards laid out as `src` into shards laid out as `dst`, sorted.

    Each element of each item moves exactly once, padding never. Items are matched by position;
    raises ValueError unless both layouts have the same number of items with the same shapes.
    """
    if len(src.specs) != len(dst.specs):
        raise ValueError(f"layouts of {len(src.specs)} and {len(dst.specs)} parameters")
    for a, b in zip(src.specs, dst.specs, strict=True):
        if a.layout_shape != b.layout_shape:
            raise ValueError(f"{a.fqns[0]} has shape {a.shape} in one layout, {b.shape} in other")
    found: list[Transfer] = []
    for item in range(len(src.specs)):
        found += _item_transfers(item, src, dst)
    return tuple(sorted(found))


def _item_transfers(item: int, src: GroupLayout, dst: GroupLayout) -> list[Transfer]:
    """Merges the two ascending lists of pieces, so the cost is their sum and not their product."""
    moves: list[Transfer] = []
    here, there = _pieces(item, src), _pieces(item, dst)
    i = j = 0
    while i < len(here) and j < len(there):
        (src_rank, a, src_offset), (dst_rank, b, dst_offset) = here[i], there[j]
        common = a.intersect(b)
        moves.append(
            Transfer(
                item,
                src_rank,
                src_offset + common.start - a.start,
                dst_rank,
                dst_offset + common.start - b.start,
                common.numel,
            )
        )
        i, j = i + (a.stop <= b.stop), j + (b.stop <= a.stop)
    return moves


def _pieces(item: int, layout: GroupLayout) -> list[tuple[int, FlatRange, int]]:
    """(rank, range inside the item, offset in the rank's shard buffer), in flat order."""
    return [
        (rank, layout.shard_range(item, rank), layout.shard_item_range(item, rank).start)
        for rank in layout.holders(item)
    ]
