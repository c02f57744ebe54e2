"""Pieces of sharded tensors that a checkpoint stores or reads as separate tensors.

A piece is a view of its tensor. Its place follows from the layout, without an exchange.
"""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from megatron_fsdp_adapter.core.dtensor.chunks import LayoutRef, dtensor_like
from megatron_fsdp_adapter.core.dtensor.uneven import Chunks, UnevenDTensor, own_chunks
from megatron_fsdp_adapter.core.layout.ranges import FlatRange, flat_range_to_boxes


def part_of(value: DTensor, ref: LayoutRef, number: int, count: int) -> DTensor:
    """Piece `number` of `count` of a parameter, or of a value of its geometry such as a moment.

    Dim 0 of the parameter's tensor-parallel slice is cut into `count` equal pieces. Piece i of the
    whole is the concatenation of the pieces i of all tensor-parallel ranks. ref: the parameter's
    place. Raises ValueError if dim 0 is no multiple of `count`.
    """
    if count == 1:
        own_chunks(value)
        return value
    rows, *rest = ref.shape
    if rows % count:
        raise ValueError(f"{ref.shape}: dim 0 cannot be cut into {count} equal pieces")
    piece = (rows // count, *rest)
    start = number * torch.Size(piece).numel()
    common = ref.held.intersect(FlatRange(start, start + torch.Size(piece).numel()))
    # An empty intersection has no position; an empty piece begins at the start.
    first = 0 if common.empty else common.start - ref.held.start
    boxes = () if common.empty else flat_range_to_boxes(common.shift(-start), piece)
    scale, offset = _tensor_parallel_place(ref, tuple(value.shape), piece)
    whole = tuple(n * k for n, k in zip(piece, scale, strict=True))
    return UnevenDTensor.over(
        value._local_tensor.detach().view(-1)[first : first + common.numel].view(-1, *rest),
        value.device_mesh,
        value._spec.placements,
        whole,
        torch.empty(whole, device="meta").stride(),
        Chunks(
            tuple((tuple(a + b for a, b in zip(o, offset, strict=True)), s) for o, s in boxes),
            (ref.layout, ref.index, piece, start),
        ),
    )


def first_rows(value: DTensor, rows: int, total: int) -> DTensor:
    """The first `rows` of `value`, as a view in a tensor of `total` rows.

    For tables that are padded at the end: a read into the view touches only rows that both tables
    have. Raises ValueError unless this rank holds whole rows, in order, and `total` has room for
    them.
    """
    if rows > total or rows > value.shape[0]:
        raise ValueError(f"{rows} rows of {value.shape[0]} do not fit into {total}")
    local = value._local_tensor.detach()
    kept, boxes = 0, []
    for (start, *rest), (length, *sizes) in own_chunks(value).boxes:
        if any(rest) or tuple(sizes) != tuple(value.shape[1:]):
            raise ValueError(f"a block of {(length, *sizes)} is not whole rows of {value.shape}")
        inside = max(0, min(start + length, rows) - start)
        if inside:
            boxes.append(((start, *rest), (inside, *sizes)))
            kept += inside
    whole = (total, *value.shape[1:])
    return UnevenDTensor.over(
        local.view(-1, *value.shape[1:])[:kept],
        value.device_mesh,
        value._spec.placements,
        whole,
        torch.empty(whole, device="meta").stride(),
        Chunks(tuple(boxes)),
    )


def join_parts(target: DTensor, ref: LayoutRef, parts: tuple[DTensor, ...]) -> DTensor:
    """A value of `target`'s geometry joined from `parts`; `target` itself, without a copy, if they
    are views of it. Raises ValueError if a part has another local shape than its place."""
    own = tuple(part_of(target, ref, i, len(parts)) for i in range(len(parts)))
    for mine, given in zip(own, parts, strict=True):
        if mine._local_tensor.shape != given._local_tensor.shape:
            raise ValueError(
                f"a piece has the local shape {tuple(given._local_tensor.shape)}, but its place "
                f"has {tuple(mine._local_tensor.shape)}, because their shardings differ"
            )
    if all(same_storage(mine, given) for mine, given in zip(own, parts, strict=True)):
        return target
    flat = torch.cat([part._local_tensor.reshape(-1) for part in parts])
    return dtensor_like(target, flat.view(target._local_tensor.shape))


def same_storage(a: DTensor, b: DTensor) -> bool:
    """True if the local tensors, of equal shape, share their memory."""
    one, other = a._local_tensor, b._local_tensor
    return one.numel() == 0 or one.data_ptr() == other.data_ptr()


def _tensor_parallel_place(
    ref: LayoutRef, whole: tuple[int, ...], piece: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Per dimension, the ratio of the whole to this rank's slice, and the offset of this rank's
    piece in the whole piece. Each rank's piece is the same fraction of its slice of the
    parameter."""
    scale = tuple(n // own for n, own in zip(whole, ref.shape, strict=True))
    at = ref.tp_offset or (0,) * len(ref.shape)
    numbers = tuple(start // own for start, own in zip(at, ref.shape, strict=True))
    return scale, tuple(k * n for k, n in zip(numbers, piece, strict=True))
