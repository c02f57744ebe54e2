"""Half-open ranges of elements in a flat buffer, and the blocks of a tensor that they stand for."""

from __future__ import annotations

import math
from dataclasses import dataclass

Shape = tuple[int, ...]

Box = tuple[Shape, Shape]
"""(offsets, sizes): a rectangular block of a tensor, one number per dimension."""


@dataclass(frozen=True, order=True)
class FlatRange:
    """Elements start <= e < stop. Raises ValueError unless 0 <= start <= stop."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop:
            raise ValueError(f"not a range: start={self.start}, stop={self.stop}")

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start

    @property
    def empty(self) -> bool:
        """True if there is no element."""
        return self.start == self.stop

    def intersect(self, other: FlatRange) -> FlatRange:
        """The common elements; FlatRange(0, 0) if there are none."""
        start = max(self.start, other.start)
        stop = min(self.stop, other.stop)
        return FlatRange(start, stop) if start < stop else EMPTY

    def contains(self, other: FlatRange) -> bool:
        """True if every element of `other` is in this range."""
        return other.empty or (self.start <= other.start and other.stop <= self.stop)

    def shift(self, k: int) -> FlatRange:
        """The range k elements further on (k may be negative)."""
        return FlatRange(self.start + k, self.stop + k)


EMPTY = FlatRange(0, 0)


def divide_up(value: int, by: int) -> int:
    """The quotient, rounded up."""
    return -(-value // by)


def shift_box(box: Box, by: Shape) -> Box:
    """The block, moved along each dimension by so many elements of `by`."""
    offsets, sizes = box
    return tuple(start + n for start, n in zip(offsets, by, strict=True)), sizes


def split_evenly(whole: FlatRange, num_parts: int, part: int) -> FlatRange:
    """Part number `part` of `num_parts` equal consecutive parts.

    Raises ValueError if the length is not a multiple of num_parts or `part` is out of bounds.
    """
    if num_parts < 1 or not 0 <= part < num_parts:
        raise ValueError(f"part {part} of {num_parts} parts does not exist")
    if whole.numel % num_parts:
        raise ValueError(f"{whole.numel} elements do not split into {num_parts} equal parts")
    size = whole.numel // num_parts
    start = whole.start + part * size
    return FlatRange(start, start + size)


def nested_shard_rank(inner_rank: int, outer_rank: int, outer_size: int) -> int:
    """The number of a shard, if shards of the inner axis are split again over the outer axis.

    The inner rank is the slowly varying part of the number: the finer shard lies inside the coarser
    one, so that the two axes can be gathered one after the other. Raises ValueError for ranks that
    do not exist.
    """
    if not 0 <= outer_rank < outer_size or inner_rank < 0:
        raise ValueError(
            f"inner rank {inner_rank} and outer rank {outer_rank} of {outer_size} do not exist"
        )
    return inner_rank * outer_size + outer_rank


def flat_range_to_boxes(part: FlatRange, shape: Shape) -> tuple[Box, ...]:
    """The blocks of a row-major tensor of `shape` that hold exactly the elements of `part`.

    Blocks come in flat order and each is contiguous in memory; for d dimensions there are at
    most 2d-1 (a partial head row, whole rows, a partial tail row, recursively). A 0-D shape is
    seen as (1,). Raises ValueError if `part` is not inside the tensor.
    """
    shape = shape or (1,)
    if part.stop > math.prod(shape):
        raise ValueError(f"{part} is not inside a tensor of shape {shape}")
    return tuple(_boxes(part.start, part.stop, shape))


def _boxes(start: int, stop: int, shape: Shape) -> list[Box]:
    if start >= stop:
        return []
    row = math.prod(shape[1:])
    first, head = divmod(start, row)
    last, tail = divmod(stop, row)
    if first == last:
        return _in_row(first, head, tail, shape)
    boxes: list[Box] = []
    if head:
        boxes += _in_row(first, head, row, shape)
        first += 1
    if first < last:
        zeros = (0,) * (len(shape) - 1)
        boxes.append(((first, *zeros), (last - first, *shape[1:])))
    if tail:
        boxes += _in_row(last, 0, tail, shape)
    return boxes


def _in_row(index: int, start: int, stop: int, shape: Shape) -> list[Box]:
    inner = _boxes(start, stop, shape[1:])
    return [((index, *offsets), (1, *sizes)) for offsets, sizes in inner]
