"""Lazy tensors: a shape, a dtype, and a function that fills any block.

A conversion is an expression over such tensors (join halves, stack layers). Writing
its result block by block holds only the block and the source chunks that it needs. All operations
except `cast` only move elements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from megatron_fsdp_adapter.core.layout.ranges import Box, Shape


@dataclass(frozen=True)
class LazyTensor:
    """A tensor of `shape` and `dtype`, read on demand.

    fill(offsets, out): writes the block that starts at `offsets` and has the shape of `out` into
    `out`, a CPU tensor of this dtype. Raises ValueError if the file that it reads is damaged.
    """

    shape: Shape
    dtype: torch.dtype
    fill: Callable[[Shape, torch.Tensor], None]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.numel * self.dtype.itemsize

    def block(self, box: Box) -> torch.Tensor:
        """The block `box` (offsets, sizes) as a new contiguous CPU tensor."""
        offsets, sizes = box
        out = torch.empty(sizes, dtype=self.dtype, device="cpu")
        self.fill(offsets, out)
        return out

    def whole(self) -> torch.Tensor:
        """The whole tensor in memory. For small tensors."""
        return self.block(((0,) * len(self.shape), self.shape))


Tensors = dict[str, LazyTensor]
"""Tensors by the names of parameters, or by keys."""


def from_tensor(tensor: torch.Tensor) -> LazyTensor:
    """A lazy view of a tensor in memory."""

    def fill(offsets: Shape, out: torch.Tensor) -> None:
        out.copy_(tensor[_slices(offsets, tuple(out.shape))])

    return LazyTensor(tuple(tensor.shape), tensor.dtype, fill)


def cast(tensor: LazyTensor, dtype: torch.dtype) -> LazyTensor:
    """The values of `tensor` rounded to `dtype`; a block of each dtype is in memory at a time."""
    if tensor.dtype == dtype:
        return tensor

    def fill(offsets: Shape, out: torch.Tensor) -> None:
        out.copy_(tensor.block((offsets, tuple(out.shape))))

    return replace(tensor, dtype=dtype, fill=fill)


def narrow(tensor: LazyTensor, start: int, length: int) -> LazyTensor:
    """The `length` rows of dimension 0 that begin at `start`."""

    def fill(offsets: Shape, out: torch.Tensor) -> None:
        tensor.fill((offsets[0] + start, *offsets[1:]), out)

    return replace(tensor, shape=(length, *tensor.shape[1:]), fill=fill)


def select(tensor: LazyTensor, index: int) -> LazyTensor:
    """`tensor[index]`: one entry of dimension 0, without that dimension."""

    def fill(offsets: Shape, out: torch.Tensor) -> None:
        tensor.fill((index, *offsets), out.unsqueeze(0))

    return replace(tensor, shape=tensor.shape[1:], fill=fill)


def concat(parts: Sequence[LazyTensor]) -> LazyTensor:
    """The concatenation of the parts along dimension 0. Raises ValueError if shapes or dtypes
    differ."""
    _check_alike(parts, [part.shape[1:] for part in parts])
    starts = []
    rows = 0
    for part in parts:
        starts.append(rows)
        rows += part.shape[0]

    def fill(offsets: Shape, out: torch.Tensor) -> None:
        begin, *rest = offsets
        end = begin + out.shape[0]
        for part, start in zip(parts, starts, strict=True):
            low = max(begin, start)
            high = min(end, start + part.shape[0])
            if low < high:
                part.fill((low - start, *rest), out[low - begin : high - begin])

    like = parts[0]
    return replace(like, shape=(rows, *like.shape[1:]), fill=fill)


def stack(parts: Sequence[LazyTensor]) -> LazyTensor:
    """The parts stacked along a new dimension 0. Raises ValueError if shapes or dtypes differ."""
    _check_alike(parts, [part.shape for part in parts])

    def fill(offsets: Shape, out: torch.Tensor) -> None:
        inner = offsets[1:]
        for i, slot in enumerate(out.unbind(0), offsets[0]):
            parts[i].fill(inner, slot)

    like = parts[0]
    return replace(like, shape=(len(parts), *like.shape), fill=fill)


def blocks(shape: Shape, itemsize: int, limit: int) -> Iterator[Box]:
    """Blocks that cover `shape` once, in order, each of at most `limit` bytes (or one element).

    Dimension 0 is cut first, and entries that are too large are cut further. An empty tensor yields
    one empty block, so that it has an entry in a file."""
    if math.prod(shape) * itemsize <= limit or not shape:
        yield (0,) * len(shape), shape
        return
    length = shape[0]
    row = shape[1:]
    row_bytes = math.prod(row) * itemsize
    if row_bytes <= limit:
        rows = limit // row_bytes
        zeros = (0,) * len(row)
        for start in range(0, length, rows):
            yield (start, *zeros), (min(rows, length - start), *row)
        return
    for index in range(length):
        for offsets, sizes in blocks(row, itemsize, limit):
            yield (index, *offsets), (1, *sizes)


def _check_alike(parts: Sequence[LazyTensor], shapes: Sequence[Shape]) -> None:
    dtypes = {part.dtype for part in parts}
    if len(set(shapes)) > 1 or len(dtypes) > 1:
        found = sorted({f"{part.shape} {part.dtype}" for part in parts})
        raise ValueError(f"tensors of different shapes or dtypes: {', '.join(found)}")


def _slices(offsets: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(start, start + n) for start, n in zip(offsets, sizes, strict=True))
