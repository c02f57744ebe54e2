"""Blocks of a shard in its tensor's axes: a pure function of the layout, equal on every rank, so a
checkpoint needs no collective to know which rank writes which block."""

from __future__ import annotations

from megatron_fsdp_adapter.core.layout.group import GroupLayout
from megatron_fsdp_adapter.core.layout.ranges import Box, flat_range_to_boxes


def chunks(
    layout: GroupLayout, index: int, rank: int, tp_offset: tuple[int, ...] | None = None
) -> tuple[Box, ...]:
    """The blocks (offsets, sizes) of parameter `index` that `rank` holds, in flat order.

    One block of rows for whole-row granules, at most 2d-1 blocks for d dimensions otherwise, none
    for an empty shard. `tp_offset` (one number per dimension), the origin of this model-parallel
    slice in the global tensor, is added to the offsets. A 0-D parameter has shape (1,) here. Raises
    ValueError if tp_offset has another number of dimensions.
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
