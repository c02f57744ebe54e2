"""Chunks: which blocks of a whole tensor a rank holds, without any exchange between ranks.

torch derives the place of a DTensor's shard from mesh and placement, which assumes an even split.
Our splits are uneven (a shard boundary falls wherever a flat buffer is cut), so each DTensor is an
`UnevenDTensor` that carries its *chunks*: blocks (offsets, sizes) of the whole tensor, in the order
of the local tensor. They are a pure function of the layout.
"""

from __future__ import annotations

import functools
import itertools
import math
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from megatron_fsdp_adapter.core.dtensor.blocks import Chunks
from megatron_fsdp_adapter.core.dtensor.uneven import (
    UnevenDTensor,
    chunks_of,
    dtensor_over,
    is_replicated,
    own_chunks,
    placed_chunks,
)
from megatron_fsdp_adapter.core.layout.group import GroupLayout
from megatron_fsdp_adapter.core.layout.ranges import (
    Box,
    FlatRange,
    Shape,
    flat_range_to_boxes,
    shift_box,
)

_WRITE_ITEMS = "__create_write_items__"
_TENSOR_SHARD = "__get_tensor_shard__"


def tile(whole: Box, blocks: Iterable[Box]) -> bool:
    """True if the blocks cover every element of `whole` exactly once, and no other element.

    A sum of blocks is determined by its signed corners, so the corners of the blocks must add up to
    those of the whole. No pair of blocks is compared.
    """
    corners: Counter[tuple[int, ...]] = Counter()
    for place, sign in _signed_corners(whole):
        corners[place] -= sign
    for block in blocks:
        for place, sign in _signed_corners(block):
            corners[place] += sign
    return not any(corners.values())


def _signed_corners(block: Box) -> Iterator[tuple[tuple[int, ...], int]]:
    """Each corner of a block, and 1 or -1: a step along one dimension changes the sign."""
    offsets, sizes = block
    ends = [((start, 1), (start + n, -1)) for start, n in zip(offsets, sizes, strict=True)]
    for corner in itertools.product(*ends):
        place = tuple(coordinate for coordinate, _ in corner)
        yield place, math.prod(sign for _, sign in corner)


@dataclass(frozen=True)
class LayoutRef:
    """The piece of a group layout that a sharded parameter is.

    layout: the group's layout. index: the parameter's number in it.
    rank: the shard number of this process.
    tp_offset: origin of this process's tensor-parallel slice in the whole tensor, one number per
        dimension (None: zeros).
    """

    layout: GroupLayout
    index: int
    rank: int
    tp_offset: tuple[int, ...] | None = None

    @property
    def shape(self) -> Shape:
        """Shape of the tensor-parallel slice; (1,) for a 0-D parameter."""
        return self.layout.specs[self.index].layout_shape

    @property
    def origin(self) -> tuple[int, ...]:
        """The slice's beginning in the whole tensor."""
        return self.tp_offset or (0,) * len(self.shape)

    @property
    def held(self) -> FlatRange:
        """The elements of the slice that this process holds."""
        return self.layout.shard_range(self.index, self.rank)

    def chunks(self) -> tuple[Box, ...]:
        """The blocks (offsets, sizes) of the whole tensor that this process holds, in flat order.

        There is one block of rows if granules are whole rows, none for an empty shard, and else at
        most 2d-1 blocks for d dimensions. Nothing is exchanged for that.
        """
        boxes = flat_range_to_boxes(self.held, self.shape)
        origin = self.origin
        return tuple(shift_box(box, origin) for box in boxes)


def lacks_chunks(value: Any) -> bool:
    """True for a sharded DTensor whose place in the whole is unknown."""
    if not isinstance(value, DTensor) or is_replicated(value):
        return False
    return placed_chunks(value) is None


def dtensor_like(source: DTensor, local: torch.Tensor) -> DTensor:
    """A DTensor over `local`, in its dtype, that lies as `source` does and has its chunks, if
    `source` carries any.

    For optimizer state and gradients. Raises ValueError if `local` has another shape than the
    local tensor of `source`, or if `source` has no chunks.
    """
    expected = source._local_tensor.shape
    if local.shape != expected:
        raise ValueError(
            f"local shape {tuple(local.shape)} is not that of the source, {tuple(expected)}"
        )
    place = (source.device_mesh, source._spec.placements, source.shape, source.stride())
    chunks = own_chunks(source)
    if type(source) is DTensor:
        return dtensor_over(local.detach(), *place)
    return UnevenDTensor.over(local.detach(), *place, chunks)


def stored_alike(source: DTensor, local: torch.Tensor) -> torch.Tensor:
    """`local` as a plain tensor that torch DCP saves as it would save `source`.

    For copies on another device than the mesh's, where a DTensor is impossible. `local` has the
    shape of the local tensor of `source`; it is returned itself, with attributes that DCP reads.
    Nothing can be loaded into it. Raises ValueError if `source` is sharded and has no chunks.
    """
    shape = source.shape
    if chunks_of(source) is None and is_replicated(source):
        whole = ((0,) * len(shape), tuple(shape))
        chunks = Chunks((whole,))
    else:
        chunks = own_chunks(source)
    chunks.check(tuple(shape), local)

    # Weak, because the function is an attribute of the tensor that it reads.
    setattr(local, _TENSOR_SHARD, functools.partial(chunks.block, weakref.proxy(local)))
    setattr(local, _WRITE_ITEMS, lambda fqn, tensor: chunks.write_items(fqn, tensor, shape))
    return local
