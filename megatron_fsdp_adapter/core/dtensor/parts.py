"""Pieces of sharded tensors that a checkpoint stores or reads as separate tensors.

A piece is a view of its tensor. Its place follows from the layout, without an exchange.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor

from megatron_fsdp_adapter.core.dtensor.blocks import Chunks
from megatron_fsdp_adapter.core.dtensor.chunks import LayoutRef, dtensor_like
from megatron_fsdp_adapter.core.dtensor.uneven import UnevenDTensor, own_chunks
from megatron_fsdp_adapter.core.layout.ranges import (
    Box,
    FlatRange,
    Shape,
    flat_range_to_boxes,
    shift_box,
)


def part_of(value: DTensor, ref: LayoutRef, number: int, count: int) -> DTensor:
    """Piece `number` of `count` of a parameter, or of a value of its geometry such as a moment.

    Dim 0 of the parameter's tensor-parallel slice is cut into `count` equal pieces. Piece i of the
    whole is the concatenation of the pieces i of all tensor-parallel ranks. With one piece that is
    `value` itself. ref: the parameter's place. Raises ValueError if dim 0 is no multiple of
    `count`, or if `value` has no chunks and `count` is 1.
    """
    if count == 1:
        own_chunks(value)  # only for its ValueError
        return value
    rows, *rest = ref.shape
    if rows % count:
        raise ValueError(f"{ref.shape}: dim 0 cannot be cut into {count} equal pieces")
    piece = (rows // count, *rest)
    numel = math.prod(piece)
    start = number * numel
    common = ref.held.intersect(FlatRange(start, start + numel))
    # An empty intersection has no position: the empty view then begins at 0.
    first = 0
    boxes: tuple[Box, ...] = ()
    if not common.empty:
        first = common.start - ref.held.start
        boxes = flat_range_to_boxes(common.shift(-start), piece)
    flat = value._local_tensor.detach().view(-1)
    local = flat[first : first + common.numel].view(-1, *rest)
    whole, offset = _tensor_parallel_place(ref, value.shape, piece)
    placed = tuple(shift_box(box, offset) for box in boxes)
    cut = (ref.layout, ref.index, piece, start)
    return _row_major(value, local, whole, Chunks(placed, cut))


def first_rows(value: DTensor, rows: int, total: int) -> DTensor:
    """The first `rows` of `value`, as a view in a tensor of `total` rows.

    For tables that are padded at the end: a read into the view touches only rows that both tables
    have. Raises ValueError unless this rank holds whole rows, in order, and `total` has room for
    them.
    """
    if rows > total or rows > value.shape[0]:
        raise ValueError(f"{rows} rows of {value.shape[0]} do not fit into {total}")
    row = tuple(value.shape[1:])
    kept = 0
    boxes = []
    for (start, *rest), (length, *sizes) in own_chunks(value).boxes:
        if any(rest) or tuple(sizes) != row:
            raise ValueError(f"a block of {(length, *sizes)} is not whole rows of {value.shape}")
        inside = max(0, min(start + length, rows) - start)
        if inside:
            boxes.append(((start, *rest), (inside, *sizes)))
            kept += inside
    local = value._local_tensor.detach().view(-1, *row)[:kept]
    return _row_major(value, local, (total, *row), Chunks(tuple(boxes)))


def _row_major(value: DTensor, local: torch.Tensor, shape: Shape, chunks: Chunks) -> UnevenDTensor:
    """A DTensor of global `shape`, contiguous as a whole, on the mesh of `value`."""
    stride = torch.empty(shape, device="meta").stride()
    return UnevenDTensor.over(
        local, value.device_mesh, value._spec.placements, shape, stride, chunks
    )


def join_parts(target: DTensor, ref: LayoutRef, parts: tuple[DTensor, ...]) -> DTensor:
    """A value that lies as `target` does, joined from all its `parts`. It is `target` itself if the
    parts are views of that. Raises ValueError if a part has another local shape than its place."""
    are_views = True
    for number, given in enumerate(parts):
        mine = part_of(target, ref, number, len(parts))
        shape = tuple(given._local_tensor.shape)
        expected = tuple(mine._local_tensor.shape)
        if shape != expected:
            raise ValueError(
                f"a piece has the local shape {shape}, but its place "
                f"has {expected}, because their shardings differ"
            )
        are_views = are_views and same_storage(mine, given)
    if are_views:
        return target
    flat = torch.cat([part._local_tensor.reshape(-1) for part in parts])
    return dtensor_like(target, flat.view(target._local_tensor.shape))


def same_storage(a: DTensor, b: DTensor) -> bool:
    """True if the local tensors, of equal shape, share their memory."""
    one = a._local_tensor
    other = b._local_tensor
    return one.numel() == 0 or one.data_ptr() == other.data_ptr()


def _tensor_parallel_place(ref: LayoutRef, whole: Sequence[int], piece: Shape) -> Box:
    """The place of this rank's piece in the piece of all tensor-parallel ranks: the shape of that
    one, and the offset in it.

    whole: shape of the whole parameter; piece: shape of this rank's piece of its slice. A piece is
    the same fraction of the slice on every rank."""
    shape = []
    offset = []
    for total, own, start, size in zip(whole, ref.shape, ref.origin, piece, strict=True):
        shape.append(size * (total // own))
        offset.append(size * (start // own))
    return tuple(shape), tuple(offset)
