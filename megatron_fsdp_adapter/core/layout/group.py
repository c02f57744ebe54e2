"""The layout of one group of parameters in one flat buffer: frozen data that checks itself.

    full buffer   [ segment 0                | segment 1                | ... ]
                    shard 0 | shard 1 | ..     shard 0 | shard 1 | ..
    rank r holds  [ segment 0 shard r        | segment 1 shard r        | ... ]

A segment is split evenly, so that it is gathered and reduced in place by one collective. Items
(parameters) lie whole inside one segment, and no shard boundary cuts a granule of an item.

A *granule* is a run of consecutive elements that a shard boundary must never cut. Its length, the
granularity, is an integer per parameter: `row_granularity(shape)` (the default: one row of
dim 0), a multiple of it (block quantization), the whole tensor (optimizers that need all of a
matrix) or 1 (element cut).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from .format import WeightFormat, plain
from .ranges import EMPTY, FlatRange, Shape, divide_up, split_evenly


def row_granularity(shape: Shape) -> int:
    """Elements in one row of dim 0: product(shape[1:]), and 1 for 0-D and 1-D shapes."""
    return math.prod(shape[1:])


@dataclass(frozen=True)
class ParamSpec:
    """One parameter of a group.

    index: position in the group.
    fqns: every qualified name it has (tied aliases included).
    shape: of this rank's model-parallel slice, before data-parallel sharding.
    granularity: elements of one granule. It must divide the number of elements, and be whole
        granules of the format.
    quantized: the format of the compute weights; None if those are in `dtype`.
    from_autograd: its gradients come from autograd alone, in `dtype`, as far as is known.
    Raises ValueError for fields that make no parameter.
    """

    index: int
    fqns: tuple[str, ...]
    shape: Shape
    dtype: torch.dtype
    requires_grad: bool
    granularity: int
    quantized: WeightFormat | None = None
    from_autograd: bool = False

    def __post_init__(self) -> None:
        if not self.fqns:
            raise ValueError(f"parameter {self.index}: fqns is empty. Give at least one name")
        name = self.fqns[0]
        shape = self.shape
        granularity = self.granularity
        if self.index < 0:
            raise ValueError(f"{name}: index {self.index} is negative")
        if any(size < 1 for size in shape):
            raise ValueError(f"{name}: shape {shape} has no elements. Remove the parameter")
        if granularity < 1 or self.numel % granularity:
            raise ValueError(
                f"{name}: granularity {granularity} does not divide the "
                f"{self.numel} elements of shape {shape}"
            )
        if self.quantized and granularity % self.quantized.granularity(shape):
            raise ValueError(
                f"{name}: granularity {granularity} cuts granules of format "
                f"{self.quantized.name} in shape {shape}"
            )

    @cached_property
    def format(self) -> WeightFormat:
        """The format of the compute weights."""
        return self.quantized or plain(self.dtype)

    @property
    def numel(self) -> int:
        """Elements of the parameter."""
        return math.prod(self.shape)

    @property
    def layout_shape(self) -> Shape:
        """`shape`, with a 0-D parameter seen as one row of one element."""
        return self.shape or (1,)

    @property
    def whole_rows(self) -> bool:
        """True if every granule is a whole number of rows, so that a shard is a block of rows."""
        return self.granularity % row_granularity(self.shape) == 0


def even_shard_numel(spec: ParamSpec, num_shards: int) -> int:
    """Elements of the largest shard of `spec`, if its rows are split as `torch.chunk` splits them.
    That is the split of torch's `Shard(0)`."""
    rows = spec.layout_shape[0]
    return divide_up(rows, num_shards) * (spec.numel // rows)


@dataclass(frozen=True)
class Segment:
    """A run of the full buffer that is split evenly over the shards.

    offset: its first element in the full buffer.
    granularity: a number of elements that divides each shard of this segment. It is a multiple of
        the granularity of each item that a shard boundary cuts.
    """

    offset: int
    numel: int
    granularity: int
    num_shards: int

    def __post_init__(self) -> None:
        if self.num_shards < 1 or self.granularity < 1 or self.numel < 1 or self.offset < 0:
            raise ValueError(f"not a segment: {self}")
        if self.numel % (self.num_shards * self.granularity) or self.offset % self.num_shards:
            raise ValueError(f"{self} does not split into shards of whole granules")

    @property
    def shard_numel(self) -> int:
        """Elements of one shard."""
        return self.numel // self.num_shards

    @property
    def shard_offset(self) -> int:
        """The start of this segment's shard in a rank's flat shard buffer."""
        return self.offset // self.num_shards

    @property
    def range(self) -> FlatRange:
        """The segment in the full buffer."""
        return FlatRange(self.offset, self.offset + self.numel)


@dataclass(frozen=True)
class Placement:
    """The place of an item: its segment, and its first element in the full buffer."""

    segment: int
    offset: int


@dataclass(frozen=True)
class GroupLayout:
    """The layout of a group's parameters on every rank, known without communication.

    specs[i] lies at placements[i]; item numbers below are positions in `specs`.
    align: the first shard of a segment, and every item, starts at a multiple of so many elements.
        There may be a gap between two segments, which is neither gathered nor reduced.
    tail: elements behind the last segment, which are not gathered or reduced either.
    Raises ValueError if the pieces do not make a layout.
    """

    specs: tuple[ParamSpec, ...]
    segments: tuple[Segment, ...]
    placements: tuple[Placement, ...]
    num_shards: int
    align: int
    tail: int = 0

    def __post_init__(self) -> None:
        if len(self.specs) != len(self.placements) or not self.specs:
            raise ValueError(f"{len(self.specs)} specs and {len(self.placements)} placements")
        self._check_segments()
        for index, spec in enumerate(self.specs):
            self._check_item(index, spec)
        self._check_disjoint()

    def _check_segments(self) -> None:
        end = 0
        for segment in self.segments:
            if segment.offset < end or segment.num_shards != self.num_shards:
                raise ValueError(
                    f"{segment} must start behind {end}, with {self.num_shards} shards"
                )
            if segment.offset % (self.num_shards * self.align):
                raise ValueError(f"shards of {segment} are not aligned to {self.align} elements")
            end = segment.offset + segment.numel
        if self.tail < 0 or self.total_numel % self.num_shards:
            raise ValueError(f"tail={self.tail}: {self.total_numel} elements are not equal shards")

    def _check_item(self, index: int, spec: ParamSpec) -> None:
        name = spec.fqns[0]
        if spec.index != index:
            raise ValueError(f"{name}: index {spec.index}, but position {index} in the group")
        first = self.specs[0]
        if spec.dtype != first.dtype or spec.requires_grad != first.requires_grad:
            raise ValueError(f"{name}: a group has one dtype and one requires_grad")
        if spec.format != first.format:
            raise ValueError(f"{name}: a group has one format")
        if spec.format.quantized and self.align % spec.format.align:
            raise ValueError(f"{name}: aligned to {self.align} elements, not as {spec.format.name}")
        number = self.placements[index].segment
        if not 0 <= number < len(self.segments):
            raise ValueError(f"{name}: segment {number} does not exist")
        segment = self.segments[number]
        extent = self.item_range(index)
        if not segment.range.contains(extent) or extent.start % self.align:
            raise ValueError(f"{name}: {extent} is not aligned, or not inside {segment}")
        shard = segment.shard_numel
        start = extent.start - segment.offset
        within_one_shard = start // shard == (start + spec.numel - 1) // shard
        cut_at_granules = start % spec.granularity == 0 and shard % spec.granularity == 0
        if not within_one_shard and not cut_at_granules:
            raise ValueError(
                f"{name}: a boundary between shards of {shard} elements cuts a granule of "
                f"{spec.granularity} elements"
            )

    def _check_disjoint(self) -> None:
        end = 0
        for extent in self._item_ranges():
            if extent.start < end:
                raise ValueError(f"two items overlap at element {extent.start}")
            end = extent.stop

    @property
    def format(self) -> WeightFormat:
        """The format of the compute weights."""
        return self.specs[0].format

    @cached_property
    def total_numel(self) -> int:
        """Elements of the full buffer, padding included."""
        last = self.segments[-1]
        return last.offset + last.numel + self.tail

    @property
    def shard_numel(self) -> int:
        """Elements of one rank's flat shard buffer, padding included."""
        return self.total_numel // self.num_shards

    @cached_property
    def item_numel(self) -> int:
        """Elements of all items, without padding."""
        return sum(spec.numel for spec in self.specs)

    @cached_property
    def has_even_rows(self) -> bool:
        """True if every item is split as torch's `Shard(0)` splits it: all shards but the last ones
        that have rows have the same number of them."""
        for spec, placement in zip(self.specs, self.placements, strict=True):
            segment = self.segments[placement.segment]
            if placement.offset != segment.offset:
                return self.num_shards == 1
            if segment.shard_numel != even_shard_numel(spec, self.num_shards):
                return self.num_shards == 1
        return True

    def item_range(self, index: int) -> FlatRange:
        """Item `index` in the full buffer."""
        start = self.placements[index].offset
        return FlatRange(start, start + self.specs[index].numel)

    def shard_range(self, index: int, rank: int) -> FlatRange:
        """The elements of item `index` that `rank` holds, counted from the item's start.

        FlatRange(0, 0) if it holds none.
        """
        extent = self.item_range(index)
        held = extent.intersect(self._shard(self.placements[index].segment, rank))
        return EMPTY if held.empty else held.shift(-extent.start)

    def local_shape(self, index: int, rank: int) -> Shape:
        """Shape of the piece of item `index` on `rank`: (rows, *shape[1:]), with 0 rows if none.

        An item whose granules are not whole rows has 1-D pieces (n,).
        """
        spec = self.specs[index]
        numel = self.shard_range(index, rank).numel
        if not spec.whole_rows:
            return (numel,)
        row = spec.shape[1:]
        return (numel // math.prod(row), *row)

    def holders(self, index: int) -> range:
        """The ranks that hold at least one element of item `index`."""
        segment = self.segments[self.placements[index].segment]
        shard = segment.shard_numel
        first = self.placements[index].offset - segment.offset
        last = first + self.specs[index].numel - 1
        return range(first // shard, last // shard + 1)

    def segment_shards(self, rank: int) -> tuple[tuple[FlatRange, FlatRange], ...]:
        """For each segment, two ranges of the rank's shard: in the full buffer, and in its flat
        shard buffer."""
        pairs = []
        for number, segment in enumerate(self.segments):
            start = segment.shard_offset
            held = FlatRange(start, start + segment.shard_numel)
            pairs.append((self._shard(number, rank), held))
        return tuple(pairs)

    def with_shards(self, num_shards: int) -> GroupLayout:
        """The layout of the same items in larger shards, each a run of consecutive shards of this
        layout.

        Raises ValueError unless `num_shards` divides the number of shards.
        """
        if num_shards < 1 or self.num_shards % num_shards:
            raise ValueError(f"{self.num_shards} shards do not make {num_shards} larger ones")
        segments = [replace(segment, num_shards=num_shards) for segment in self.segments]
        return replace(self, segments=tuple(segments), num_shards=num_shards)

    def gaps(self) -> tuple[FlatRange, ...]:
        """The padding: ranges of the full buffer that no item covers, merged and sorted."""
        found = []
        end = 0
        for extent in self._item_ranges():
            if extent.start > end:
                found.append(FlatRange(end, extent.start))
            end = extent.stop
        if self.total_numel > end:
            found.append(FlatRange(end, self.total_numel))
        return tuple(found)

    def _item_ranges(self) -> list[FlatRange]:
        """The items in the full buffer, in their order there."""
        return sorted(self.item_range(index) for index in range(len(self.specs)))

    def _shard(self, number: int, rank: int) -> FlatRange:
        return split_evenly(self.segments[number].range, self.num_shards, rank)


@dataclass(frozen=True, eq=False)
class ShardSpec:
    """Shard number `rank` of `layout`. It gives the shard's elements of each segment and of each
    parameter. Objects are compared by identity, so that views can be looked up by them."""

    layout: GroupLayout
    rank: int

    def range(self, index: int) -> FlatRange:
        """The elements of parameter `index`, counted from its start; FlatRange(0, 0) if none."""
        return self.layout.shard_range(index, self.rank)

    def shape(self, index: int) -> Shape:
        """Shape of that piece, as of `GroupLayout.local_shape`."""
        return self.layout.local_shape(index, self.rank)

    @cached_property
    def segments(self) -> tuple[tuple[FlatRange, FlatRange], ...]:
        """Pairs of ranges, as those of `GroupLayout.segment_shards`."""
        return self.layout.segment_shards(self.rank)
