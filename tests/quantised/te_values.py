"""What the fields of a weight in Transformer Engine's classes stand for in each pass, with scales
in the shape that TE's matrix products want."""

from __future__ import annotations

from typing import Any

import torch


def rows_of(weight: Any) -> torch.Tensor:
    """(M, K), for forward."""
    kind = type(weight).__name__
    if kind == "MXFP8Tensor":
        m, k = weight.shape
        _check_columns(weight)
        scales = _check_padded(weight._rowwise_scale_inv, (m, k), 32)[:m, : k // 32]
        factors = _powers(scales).repeat_interleave(32, 1)
        return _decoded(weight._rowwise_data, factors).to(weight.dtype)
    data = getattr(weight, "_data", None)
    return _known(weight, weight._rowwise_data if data is None else data)


def columns_of(weight: Any) -> torch.Tensor:
    """(M, K), for backward."""
    kind, (m, k) = type(weight).__name__, tuple(weight.shape)
    if kind == "MXFP8Tensor":
        scales = weight._columnwise_scale_inv
        _check_padded(weight._rowwise_scale_inv, (m, k), 32)
        _check_columns(weight)
        factors = _powers(scales[: m // 32, :k]).repeat_interleave(32, 0)
        return _decoded(weight._columnwise_data, factors).to(weight.dtype)
    turned = getattr(weight, "_transpose", None)
    return _known(weight, (weight._columnwise_data if turned is None else turned).t())


def derived(weight: Any) -> Any:
    """What is derived of rows, or None."""
    if type(weight).__name__ == "MXFP8Tensor":
        return None
    return weight._transpose if hasattr(weight, "_transpose") else weight._columnwise_data


def _check_columns(weight: Any) -> None:
    """Of MXFP8."""
    m, k = weight.shape
    expected = (-(-m // 32 // 4) * 4, -(-k // 128) * 128)
    assert tuple(weight._columnwise_scale_inv.shape) == expected, expected


def _check_padded(scales: torch.Tensor, shape: Any, block: int) -> torch.Tensor:
    expected = (-(-shape[0] // 128) * 128, -(-shape[1] // block // 4) * 4)
    assert tuple(scales.shape) == expected, (tuple(scales.shape), expected)
    return scales


def _powers(exponents: torch.Tensor) -> torch.Tensor:
    return torch.pow(2.0, exponents.double() - 127)


def _decoded(data: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    return data.contiguous().view(torch.float8_e4m3fn).to(factors.dtype) * factors


def _known(weight: Any, data: torch.Tensor) -> torch.Tensor:
    """Of one scale a weight, or one for 128 x 128."""
    scales = getattr(weight, "_scale_inv", None)
    if scales is None:
        spread = weight._rowwise_scale_inv.repeat_interleave(128, 0).repeat_interleave(128, 1)
        scales = spread[: data.shape[0], : data.shape[1]]
    return _decoded(data, scales).to(weight.dtype)
