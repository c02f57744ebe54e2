"""What the fields of a weight in Transformer Engine's classes stand for in each pass, with scales
in the shape that TE's matrix products want."""

from __future__ import annotations

from typing import Any

import torch

from tests.quantized.arithmetic import decoded


def rows_of(weight: Any) -> torch.Tensor:
    """(M, K), for forward."""
    _check_padded(weight)
    return decoded(weight).to(weight.dtype)


def columns_of(weight: Any) -> torch.Tensor:
    """(M, K), for backward."""
    _check_padded(weight)
    return decoded(weight, columns=True).to(weight.dtype)


def derived(weight: Any) -> Any:
    """What is derived of rows, or None."""
    if type(weight).__name__ == "MXFP8Tensor":
        return None
    return weight._transpose if hasattr(weight, "_transpose") else weight._columnwise_data


def _check_padded(weight: Any) -> None:
    """Of MXFP8."""
    if type(weight).__name__ == "MXFP8Tensor":
        m, k = weight.shape
        rows = -(-m // 128) * 128, -(-k // 32 // 4) * 4
        columns = -(-m // 32 // 4) * 4, -(-k // 128) * 128
        found = weight._rowwise_scale_inv.shape, weight._columnwise_scale_inv.shape
        assert tuple(map(tuple, found)) == (rows, columns), found
