"""The form of a group's compute weights: flat buffers beside each other, its *planes*, and where
shards may be cut.

A weight in the compute dtype is one plane. A quantized weight has bytes, and scales of blocks of
its elements, in planes of their own. All planes of a group share one layout: a plane has one
element for each block of the weight, blocks lie inside granules, and granules inside shards, so
that a shard of a plane is the plane of the shard.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from .ranges import FlatRange, Shape

PLANE_ALIGNMENT = 16
"""Bytes that the start of each shard of each plane is a multiple of."""


@dataclass(frozen=True)
class Plane:
    """One flat buffer of a format.

    name: "rowwise", "columnwise", "rowwise_scales", ...; libraries of quantized weights know it.
    dtype: of its elements. block: rows and columns of the weight that one element stands for.
    Raises ValueError for a block that has no elements.
    """

    name: str
    dtype: torch.dtype
    block: tuple[int, int] = (1, 1)

    def __post_init__(self) -> None:
        if min(self.block) < 1:
            raise ValueError(f"not a plane: {self}")

    @property
    def elements(self) -> int:
        """Elements of the weight that one element of the plane stands for."""
        return self.block[0] * self.block[1]

    def numel(self, elements: int) -> int:
        """Elements of the plane for `elements` of the weight. Raises ValueError if those are no
        whole blocks."""
        if elements % self.elements:
            raise ValueError(f"{elements} elements are no whole blocks of plane {self}")
        return elements // self.elements

    def nbytes(self, elements: int) -> int:
        """Bytes of the plane."""
        return self.numel(elements) * self.dtype.itemsize

    def range(self, extent: FlatRange) -> FlatRange:
        """The range in the plane's buffer of a range in the weight's flat buffer."""
        return FlatRange(self.numel(extent.start), self.numel(extent.stop))

    def shape(self, shape: Shape) -> Shape:
        """The shape of the plane for a weight of `shape`, or for some rows of a weight. Raises
        ValueError unless blocks divide it."""
        rows, columns = self.block
        if rows == columns == 1:
            return shape
        if len(shape) != 2 or shape[0] % rows or shape[1] % columns:
            raise ValueError(
                f"a weight of shape {shape} has no whole blocks of {rows} x {columns} elements, "
                f"of which plane {self.name!r} has a value each"
            )
        return shape[0] // rows, shape[1] // columns


@dataclass(frozen=True)
class WeightFormat:
    """The representation of the compute weights of a group. Frozen and equal on all ranks.

    name: of the format. planes: its buffers, in the order in which they are gathered.
    rows: rows of dim 0 in a granule, which no shard boundary cuts.
    align: shards and items start at a multiple of so many elements.
    Raises ValueError for planes whose shards would not be aligned, or whose blocks would be cut.
    """

    name: str
    planes: tuple[Plane, ...]
    rows: int = 1
    align: int = 16

    def __post_init__(self) -> None:
        names = {plane.name for plane in self.planes}
        if not names or len(names) < len(self.planes) or self.rows < 1 or self.align < 1:
            raise ValueError(f"not a format: {self}")
        for plane in self.planes:
            if self.rows % plane.block[0]:
                raise ValueError(
                    f"format {self.name}: granules of {self.rows} rows cut blocks of {plane}"
                )
            if self.align % plane.elements or plane.nbytes(self.align) % PLANE_ALIGNMENT:
                raise ValueError(
                    f"format {self.name}: shards that start at a multiple of {self.align} elements "
                    f"are not aligned to {PLANE_ALIGNMENT} bytes in {plane}"
                )

    @property
    def quantized(self) -> bool:
        """True if the planes are anything but the weights, in the compute dtype."""
        return self.name != PLAIN

    @property
    def has_columns(self) -> bool:
        """True if backward has planes of its own. In other formats it derives a transpose."""
        return any(plane.name == "columnwise" for plane in self.planes)

    def keeps_shards(self, trained: bool) -> bool:
        """True if this rank keeps its shard of the planes between two gathers.

        Trained weights are cast again into the buffer of every gather. That costs as much as
        copying a kept shard there, and no memory. Frozen weights are cast only once. Weights with
        columns are two casts, so they are kept too."""
        return self.quantized and (self.has_columns or not trained)

    def nbytes(self, elements: int) -> int:
        """Bytes of all planes for so many elements of a flat buffer."""
        return sum(plane.nbytes(elements) for plane in self.planes)

    def granularity(self, shape: Shape) -> int:
        """Elements of one granule of a weight of `shape`: `rows` rows of dim 0.

        If `rows` does not divide dim 0, the granule is all of the weight, which then lies whole on
        one shard. Raises ValueError if the format cannot represent such a weight at all."""
        for plane in self.planes:
            plane.shape(shape)  # only for its ValueError
        if not self.cuts(shape):
            return math.prod(shape)
        return self.rows * math.prod(shape[1:])

    def cuts(self, shape: Shape) -> bool:
        """True if shard boundaries may lie inside a weight of `shape`."""
        rows = shape[0] if shape else 1
        return rows % self.rows == 0


PLAIN = "plain"


def plain(dtype: torch.dtype) -> WeightFormat:
    """Weights in the compute dtype: one plane."""
    return WeightFormat(PLAIN, (Plane("weight", dtype),))


_BYTES = torch.uint8

PER_TENSOR = WeightFormat("per_tensor", (Plane("rowwise", _BYTES),), align=32)
"""8-bit floats with one scale a weight. The scale is the same on all ranks, beside the planes."""

BLOCK128 = WeightFormat("block128", (Plane("rowwise", _BYTES),), rows=16, align=32)
"""8-bit floats with one scale for each 128 x 128 elements, on all ranks. 16 rows a granule and not
128, since kernels store strips of 16 rows whole: 128 would pad the layers of large models several
times over, and fewer than 16 let a kernel write into what lies behind a shard."""

MXFP8 = WeightFormat(
    "mxfp8",
    (
        Plane("rowwise", _BYTES),
        Plane("rowwise_scales", _BYTES, (1, 32)),
        Plane("columnwise", _BYTES),
        Plane("columnwise_scales", _BYTES, (32, 1)),
    ),
    rows=32,
    align=512,
)
"""8-bit floats twice: for forward with one scale for each 32 elements of a row, for backward with
one for each 32 of a column. Scales are gathered with the bytes: no other rank has them."""
