"""The tables of kernels that cast the rows of many weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch

MAX = 448.0
BLOCK = 128
"""Rows and columns of the blocks that share a scale."""
GROUP = 32
"""Neighbors in a row, or in a column, that share a scale in MXFP8."""
CHUNK = 16384
"""Elements that one program of a pass takes, where there are no blocks."""
HINT = 16
"""Kernels load and store vectors where addresses (in bytes) and sizes are multiples of this."""


@dataclass(frozen=True)
class CastTable:
    """The numbers that kernels read."""

    # int64, one line for each weight: its own numbers, then its addresses, in the order of
    # `LocalRows.tensors`.
    lines: torch.Tensor
    # int32, one line for each program: its weight's line, and its number within the weight.
    work: torch.Tensor
    # Dtype of main weights, and that which they are rounded to.
    main: torch.dtype
    rounded: torch.dtype
    # True if addresses and sizes are multiples of `HINT`.
    aligned: bool
    # The number of programs whose whole block is here. They come first.
    whole: int = 0
