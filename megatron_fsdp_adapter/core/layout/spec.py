"""Description of one parameter for a flat buffer: shape, dtype, names, granularity.

A *granule* is a run of consecutive elements that a shard boundary must never cut. Its length, the
granularity, is an integer per parameter: `row_granularity(shape)` (the default: one row of
dim 0), a multiple of it (block quantization), the whole tensor (optimizers that need all of a
matrix) or 1 (element cut).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch

from .format import WeightFormat, plain


def row_granularity(shape: tuple[int, ...]) -> int:
    """Elements in one row of dim 0: product(shape[1:]), and 1 for 0-D and 1-D shapes."""
    return math.prod(shape[1:])


@dataclass(frozen=True)
class ParamSpec:
    """One parameter of a group.

    index: position in the group; fqns: every qualified name it has (tied aliases included);
    shape: the shape on this rank's model-parallel slice, before data-parallel sharding;
    granularity: elements of one granule; it must divide the number of elements, and be whole
    granules of the format;
    quantized: the format of the compute weights, None if that is `dtype`;
    from_autograd: its gradients come from autograd alone, in `dtype`, as far as is known.
    Raises ValueError for anything else.
    """

    index: int
    fqns: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    granularity: int
    quantized: WeightFormat | None = None
    from_autograd: bool = False

    def __post_init__(self) -> None:
        if not self.fqns:
            raise ValueError(f"parameter {self.index}: fqns is empty. Give at least one name")
        if self.index < 0:
            raise ValueError(f"{self.fqns[0]}: index {self.index} is negative")
        if any(size < 1 for size in self.shape):
            raise ValueError(
                f"{self.fqns[0]}: shape {self.shape} has no elements. Remove the parameter"
            )
        if self.granularity < 1 or self.numel % self.granularity:
            raise ValueError(
                f"{self.fqns[0]}: granularity {self.granularity} does not divide the "
                f"{self.numel} elements of shape {self.shape}"
            )
        if self.quantized and self.granularity % self.quantized.granularity(self.shape):
            raise ValueError(
                f"{self.fqns[0]}: granularity {self.granularity} cuts granules of format "
                f"{self.quantized.name} in shape {self.shape}"
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
    def layout_shape(self) -> tuple[int, ...]:
        """`shape`, with a 0-D parameter seen as one row of one element."""
        return self.shape or (1,)

    @property
    def whole_rows(self) -> bool:
        """True if every granule is a whole number of rows, so that a shard is a block of rows."""
        return self.granularity % row_granularity(self.shape) == 0
