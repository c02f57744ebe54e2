"""Makes what Transformer Engine's tensors have and gathered planes do not: scales padded to the
shape that its GEMMs take, and columns of weights that were made without."""

from __future__ import annotations

import torch

from .e4m3 import MxCast, OwnRows
from .tables import GROUP


def padded_shape(shape: tuple[int, int], multiples: tuple[int, int]) -> tuple[int, int]:
    """`shape`, rounded up."""
    return -(-shape[0] // multiples[0]) * multiples[0], -(-shape[1] // multiples[1]) * multiples[1]


def padded(scales: torch.Tensor, multiples: tuple[int, int]) -> torch.Tensor:
    """A copy of (rows, columns) scales, filled up with zeros to `multiples`."""
    shape = (scales.shape[0], scales.shape[1])
    found = scales.new_zeros(padded_shape(shape, multiples))
    found[: shape[0], : shape[1]].copy_(scales)
    return found


def mx_columns(value: torch.Tensor, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes (M, K) and scales (M / 32, K) along the columns of an MXFP8 weight, of the value (M, K)
    that it was made from; on the device of `like`. They do not follow from its rows."""
    main = value.detach().to(like.device).reshape(-1)
    sizes = (main.numel(), main.numel(), main.numel() // GROUP, main.numel() // GROUP)
    rows, columns, row_scales, scales = (main.new_empty(n, dtype=torch.uint8) for n in sizes)
    shape = (value.shape[0], value.shape[1])
    MxCast([OwnRows(shape, 0, main, (rows, columns, row_scales, scales))], value.dtype).finish()
    return columns.view(shape), scales.view(shape[0] // GROUP, shape[1])
