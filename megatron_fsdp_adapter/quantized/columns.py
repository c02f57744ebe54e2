"""Makes what Transformer Engine's tensors have and gathered planes do not: scales padded to the
shape that its GEMMs take, and columns of weights that were made without columns."""

from __future__ import annotations

import torch

from .e4m3 import LocalRows, MxCast
from .tables import GROUP


def padded_shape(scales: torch.Tensor, multiples: tuple[int, int]) -> tuple[int, ...]:
    """The shape of (rows, columns) scales, rounded up to `multiples`."""
    both = zip(scales.shape, multiples, strict=True)
    return tuple(-(-size // multiple) * multiple for size, multiple in both)


def padded(scales: torch.Tensor, multiples: tuple[int, int]) -> torch.Tensor:
    """A copy of (rows, columns) scales, filled up with zeros to `multiples`."""
    found = scales.new_zeros(padded_shape(scales, multiples))
    rows, columns = scales.shape
    found[:rows, :columns].copy_(scales)
    return found


def mx_columns(value: torch.Tensor, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes (M, K) and scales (M / 32, K) along the columns of an MXFP8 weight, on the device of
    `like`. They cannot be made of its rows, so `value` (M, K) is what it was quantized from."""
    main = value.detach().to(like.device).reshape(-1)
    numel = main.numel()
    row_bytes = main.new_empty(numel, dtype=torch.uint8)
    column_bytes = torch.empty_like(row_bytes)
    row_scales = main.new_empty(numel // GROUP, dtype=torch.uint8)
    column_scales = torch.empty_like(row_scales)
    planes = (row_bytes, column_bytes, row_scales, column_scales)
    MxCast([LocalRows(tuple(value.shape), 0, main, planes)], value.dtype).finish()
    return column_bytes.view(value.shape), column_scales.view(len(value) // GROUP, -1)
