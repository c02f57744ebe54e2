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
MatrixShape = tuple[int, int]
"""(rows, columns) of a whole matrix."""


def row_blocks(rows: int, heights: tuple[int, ...]) -> tuple[Blocks, ...]:
    """The rows of each part's matrix, in a parameter of `rows` rows.

    Raises ValueError unless the heights, of 1 or more, fit into the rows a whole number of times.
    """
    period = sum(heights)
    if not heights or min(heights) < 1 or rows % period:
        raise ValueError(f"parts of {list(heights)} rows do not make {rows} rows")
    if len(heights) == 1:
        return (((0, rows),),)
    blocks = []
    first = 0
    for height in heights:
        starts = range(first, rows, period)
        blocks.append(tuple((start, start + height) for start in starts))
        first += height
    return tuple(blocks)


Member = tuple[int, int]
"""A rank of an exchange: which shard of the layout it holds, of which tensor-parallel part."""


@dataclass(frozen=True)
class Run:
    """Neighboring elements of a matrix that a rank holds, and that are exchanged."""

    # Number of the parameter among those that are exchanged together.
    param: int
    # Number of the matrix in the parameter.
    matrix: int
    # Their place in the rank's rows of the parameter.
    local: FlatRange
    # Number of the panel of the matrix.
    panel: int
    # Where they begin in the panel, in elements.
    at: int

    @property
    def place(self) -> slice:
        """Their slice of the rank's flat rows."""
        return slice(self.local.start, self.local.stop)

    @property
    def place_in_panel(self) -> slice:
        return slice(self.at, self.at + self.local.numel)


@dataclass(frozen=True)
class MuonParam:
    """A parameter that Muon updates."""

    # The layout that its elements are in.
    layout: GroupLayout
    # Its number in the layout.
    index: int
    # The dim that tensor parallelism splits; None if each rank has all of it.
    split: int | None
    # The number of tensor-parallel ranks.
    parts: int
    # Rows of each part, if rows are fused; of the one part, if not.
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
    def shapes(self) -> tuple[MatrixShape, ...]:
        """The shapes of its matrices."""
        columns = self.columns * self.panels
        return tuple((sum(b - a for a, b in blocks), columns) for blocks in self.blocks)

    @property
    def numel(self) -> int:
        """Number of elements of its matrices."""
        return sum(rows * columns for rows, columns in self.shapes)

    def runs(self, number: int, matrix: int, member: Member) -> Iterator[Run]:
        """The runs of `member` in one of its matrices, in order. number: of the parameter."""
        shard, part = member
        height, width = self.local_shape
        first = part * height if self.split == 0 else 0  # of this part's rows
        panel = part if self.split == 1 else 0
        held = self.layout.shard_range(self.index, shard)
        at = 0
        for start, stop in self.blocks[matrix]:
            low = max(start, first)
            high = min(stop, first + height)
            if low < high:
                here = FlatRange((low - first) * width, (high - first) * width)
                own = here.intersect(held)
                if not own.empty:
                    offset = (at + low - start) * width + own.start - here.start
                    yield Run(number, matrix, own.shift(-held.start), panel, offset)
            at += stop - start
