"""Blocks of a whole tensor that a rank has, as torch DCP saves and loads them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from ..layout.ranges import Box, Shape


@dataclass(frozen=True)
class Chunks:
    """The blocks (offsets, sizes) of a whole tensor that a rank has, in the order of the elements
    of its local tensor; none if that is empty.

    cut: a value from which the blocks of *every* rank follow. Tensors of one shape with equal cuts
    lie alike on all ranks. None: only this rank's blocks are known.
    """

    boxes: tuple[Box, ...]
    cut: Any = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Chunks:
        return self  # its cut refers to the whole layout, and nothing changes either

    def check(self, shape: Shape, local: torch.Tensor) -> None:
        """ValueError unless every block is inside `shape` and together they are as large as
        `local`."""
        numel = 0
        for offsets, sizes in self.boxes:
            if not _is_inside(offsets, sizes, shape):
                raise ValueError(
                    f"chunk at {offsets} of size {sizes} is not inside a {shape} tensor"
                )
            numel += math.prod(sizes)
        if numel != local.numel():
            raise ValueError(
                f"chunks {self.boxes} have {numel} elements, the local tensor of shape "
                f"{tuple(local.shape)} has {local.numel()}"
            )

    def listed(self) -> list[ChunkStorageMetadata]:
        """The chunks as torch DCP's metadata."""
        return [
            ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            for offsets, sizes in self.boxes
        ]

    def write_items(self, fqn: str, local: torch.Tensor, shape: torch.Size) -> list[WriteItem]:
        """The items that torch DCP saves for `fqn`, a tensor of global `shape`, from this rank."""
        items = []
        for chunk in self.listed():
            index = MetadataIndex(fqn, chunk.offsets)
            properties = TensorProperties.create_from_tensor(local)
            data = TensorWriteData(chunk=chunk, properties=properties, size=shape)
            items.append(WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data))
        return items

    def block(self, local: torch.Tensor, index: MetadataIndex) -> torch.Tensor:
        """A view of the part of `local` that torch DCP means by `index`. Raises ValueError if this
        rank has no such part."""
        for (offsets, _), part in self._parts(local):
            if index.offset is None or torch.Size(offsets) == index.offset:
                return part
        raise ValueError(f"{index.fqn}: no chunk at {index.offset} on this rank")

    def take_from(self, whole: torch.Tensor, local: torch.Tensor) -> None:
        """Copies the blocks out of `whole` into `local`."""
        for box, part in self._parts(local):
            part.copy_(whole[_place(box)])

    def put_into(self, whole: torch.Tensor, local: torch.Tensor) -> None:
        """Copies `local` into the blocks of `whole`."""
        for box, part in self._parts(local):
            whole[_place(box)].copy_(part)

    def _parts(self, local: torch.Tensor) -> Iterator[tuple[Box, torch.Tensor]]:
        """Each block, and the view of `local` that has its elements. `view` and not `reshape`,
        which may copy: a load writes through it."""
        flat = local.view(-1)
        start = 0
        for box in self.boxes:
            _, sizes = box
            end = start + math.prod(sizes)
            yield box, flat[start:end].view(sizes)
            start = end


def _is_inside(offsets: Sequence[int], sizes: Sequence[int], shape: Sequence[int]) -> bool:
    """True for a block with elements, all of them of a tensor of `shape`."""
    if len(offsets) != len(shape) or len(sizes) != len(shape):
        return False
    for start, size, whole in zip(offsets, sizes, shape, strict=True):
        if start < 0 or size < 1 or start + size > whole:
            return False
    return True


def _place(box: Box) -> tuple[slice, ...]:
    offsets, sizes = box
    return tuple(slice(at, at + n) for at, n in zip(offsets, sizes, strict=True))
