"""The real matrices that a parameter is made of, and which of their elements each rank holds.

A fused parameter is *parts* of rows that repeat: with heights (h, k, k), the rows of a fused QKV of
grouped attention are h of queries, k of keys, k of values, and so on for each group. All rows of
one part, of every group and every tensor-parallel rank, make one matrix. A gated first layer is the
same with two parts, which repeat once for each tensor-parallel rank. What is not fused is one part.

A matrix on its owner is *panels*: one, or one for each tensor-parallel rank where those split its
columns. A panel is contiguous, so that whatever a rank holds of it is contiguous runs in both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from ...core.layout.group import GroupLayout
from ...core.layout.ranges import FlatRange

Blocks = tuple[tuple[int, int], ...]
"""(start, stop) of rows, in order."""


def row_blocks(rows: int, heights: tuple[int, ...]) -> tuple[Blocks, ...]:
    """The rows of each part's matrix, in a parameter of `rows` rows.

    Raises ValueError unless the heights, of 1 or more, fit into the rows a whole number of times.
    """
    period = sum(heights)
    if not heights or min(heights) < 1 or rows % period:
        raise ValueError(f"parts of {list(heights)} rows do not make {rows} rows")
    if len(heights) == 1:
        return (((0, rows),),)
    starts = [sum(heights[:number]) for number in range(len(heights))]
    return tuple(
        tuple((at + start, at + start + height) for at in range(0, rows, period))
        for start, height in zip(starts, heights, strict=True)
    )


Member = tuple[int, int]
"""A rank of an exchange: which shard of the layout it holds, of which tensor-parallel part."""


@dataclass(frozen=True)
class Run:
    """Elements that a rank holds of a matrix, and that travel. param, matrix: their numbers, of the
    parameter among those that are exchanged together; local: their place in the rank's rows of the
    parameter; panel, at: the panel of the matrix, and the first element there."""

    param: int
    matrix: int
    local: FlatRange
    panel: int
    at: int


@dataclass(frozen=True)
class MuonParam:
    """A parameter that Muon updates.

    layout, index: where its elements are; split: the dim that tensor parallelism splits, None if
    each rank has all of it; parts: over how many ranks; heights: of the parts of fused rows.
    """

    layout: GroupLayout
    index: int
    split: int | None
    parts: int
    heights: tuple[int, ...]

    @property
    def name(self) -> str:
        return self.layout.specs[self.index].fqns[0]

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of one tensor-parallel part."""
        return self.layout.specs[self.index].layout_shape

    @property
    def rows(self) -> int:
        return self.local_shape[0] * (self.parts if self.split == 0 else 1)

    @property
    def panels(self) -> int:
        return self.parts if self.split == 1 else 1

    @property
    def columns(self) -> int:
        """The columns of a panel."""
        return self.local_shape[1]

    @cached_property
    def blocks(self) -> tuple[Blocks, ...]:
        return row_blocks(self.rows, self.heights)

    @cached_property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """(rows, columns) of each of its matrices, whole."""
        columns = self.columns * self.panels
        return tuple((sum(b - a for a, b in blocks), columns) for blocks in self.blocks)

    def runs(self, number: int, matrix: int, member: Member) -> Iterator[Run]:
        """The runs of `member` in one of its matrices, in order. number: of the parameter."""
        shard, part = member[0], 0 if self.split is None else member[1]
        height, width = self.local_shape
        first = part * height if self.split == 0 else 0
        held = self.layout.shard_range(self.index, shard)
        panel = part if self.split == 1 else 0
        at = 0
        for start, stop in self.blocks[matrix]:
            low, high = max(start, first), min(stop, first + height)
            if low < high:
                here = FlatRange((low - first) * width, (high - first) * width)
                own = here.intersect(held)
                if not own.empty:
                    offset = (at + low - start) * width + own.start - here.start
                    yield Run(number, matrix, own.shift(-held.start), panel, offset)
            at += stop - start
