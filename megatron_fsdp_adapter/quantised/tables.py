"""What kernels that cast the rows of many weights are told of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

MAX = 448.0
BLOCK = 128
"""Rows and columns of the blocks that share a scale."""
TINY, LARGEST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
FULL, SIXTH = MAX * 6.0, float(torch.tensor(1.0) / torch.tensor(6.0))
"""NVFP4's largest scale times its largest element, and one over that in float32."""
GROUP = 32
"""Neighbours in a row, or in a column, that share a scale in MXFP8."""
TILE, BAND = 16, 256
"""Rows and columns of the tiles that share a scale in NVFP4; columns that one program takes of the
rows of a tile."""
CHUNK = 16384
"""Elements that one program of a pass takes, where there are no blocks."""
HINT = 16
"""Kernels load and store vectors where addresses (in bytes) and sizes are multiples of this."""


@dataclass(frozen=True)
class Table:
    """What kernels read. lines: int64, one a weight: its own numbers, then its addresses, in the
    order of `OwnRows.tensors`. work: int32, line and number within the weight of each program, of
    which the first `whole` have all of a block; aligned: addresses and sizes are multiples of
    `HINT`."""

    lines: torch.Tensor
    work: torch.Tensor
    main: torch.dtype
    rounded: torch.dtype
    aligned: bool
    whole: int = 0
