"""How whole weights are quantized, in four recipes: what shards are compared with.

As Transformer Engine's kernels do it, with torch's operations: values are rounded to the weight's
dtype, multiplied by a scale, and rounded to 8 bits (E4M3, to nearest even, saturating).
"""

from __future__ import annotations

from typing import Any

import torch

MAX = 448.0
F32_MAX = torch.finfo(torch.float32).max


def up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def e4m3(values: torch.Tensor) -> torch.Tensor:
    """Bytes, saturating; torch's own cast does not, and keeps the sign of NaN."""
    found = values.clamp(-MAX, MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.where(values.isnan(), torch.full_like(found, 0x7F), found)


def from_e4m3(data: torch.Tensor) -> torch.Tensor:
    return data.contiguous().view(torch.float8_e4m3fn).float()


def scale_of(amax: torch.Tensor, power_of_two: bool = False) -> torch.Tensor:
    """448 / amax; 1 where there is nothing to scale, or too much."""
    found = torch.full_like(amax, MAX) / amax  # `MAX / amax` rounds twice
    scale = torch.where((amax == 0) | ~torch.isfinite(amax), torch.ones_like(amax), found)
    scale = torch.where(torch.isinf(scale), torch.full_like(scale, F32_MAX), scale)
    if power_of_two:
        scale = (scale.view(torch.int32) & ~0x7FFFFF).view(torch.float32)
    return scale


def rounded(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return weight.to(dtype).float()


# One scale a weight.


def per_tensor(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return e4m3(weight * scale)


# One scale for 128 x 128.


def block_amax(weight: torch.Tensor, shape: tuple[int, int], start: int) -> torch.Tensor:
    """(ceil(M / 128), ceil(K / 128)): of rows of a weight of `shape` that begin at element `start`;
    0 where there are none."""
    rows, columns = shape
    padded = torch.zeros(up(rows, 128), up(columns, 128))
    first = start // columns
    padded[first : first + weight.shape[0], :columns] = weight.abs()
    return padded.view(up(rows, 128) // 128, 128, up(columns, 128) // 128, 128).amax((1, 3))


def spread(blocks: torch.Tensor, shape: tuple[int, int], rows: int, columns: int) -> torch.Tensor:
    """The value of its block for each element of a weight of `shape`."""
    full = blocks.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    return full[: shape[0], : shape[1]]


def block128(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes and inverse scales of a whole weight."""
    shape = (weight.shape[0], weight.shape[1])
    scale = scale_of(block_amax(weight, shape, 0), True)
    return e4m3(weight * spread(scale, shape, 128, 128)), 1.0 / scale


# One scale (E8M0) for 32 elements, along rows and along columns.


def e8m0(value: torch.Tensor) -> torch.Tensor:
    bits = value.view(torch.int32)
    exponent, mantissa = (bits >> 23) & 0xFF, bits & 0x7FFFFF
    small = (exponent == 0) & (mantissa <= 0x400000)
    more = (mantissa > 0) & (exponent != 0xFE) & ~small
    found = torch.where(more, exponent + 1, exponent)
    return torch.where(value == 0, torch.zeros_like(found), found).clamp(max=254).to(torch.uint8)


def from_e8m0(scale: torch.Tensor) -> torch.Tensor:
    exponent = scale.to(torch.int32)
    tiny = torch.full_like(exponent, 0x400000)
    return torch.where(exponent == 0, tiny, exponent << 23).view(torch.float32)


def inverse_e8m0(scale: torch.Tensor) -> torch.Tensor:
    exponent = scale.to(torch.int32)
    tiny = torch.full_like(exponent, 0x400000)
    return torch.where(exponent == 254, tiny, (254 - exponent) << 23).view(torch.float32)


def mxfp8(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """All planes, of a whole weight or of 32 n rows of one."""
    rows, columns = weight.shape
    part = torch.tensor(1.0) / MAX
    row = e8m0(weight.view(rows, columns // 32, 32).abs().amax(2) * part)
    column = e8m0(weight.view(rows // 32, 32, columns).abs().amax(1) * part)
    return {
        "rowwise": e4m3(weight * inverse_e8m0(row).repeat_interleave(32, 1)),
        "rowwise_scales": row,
        "columnwise": e4m3(weight * inverse_e8m0(column).repeat_interleave(32, 0)),
        "columnwise_scales": column,
    }


# What fields stand for.


def decoded(weight: Any, columns: bool = False) -> torch.Tensor:
    """Of a weight in one of Transformer Engine's classes the values (M, K), float32, that its rows
    stand for, or its columns."""
    m, k = weight.shape
    if hasattr(weight, "_scale_inv"):
        return from_e4m3(weight._transpose.t() if columns else weight._data) * weight._scale_inv
    data = weight._columnwise_data if columns else weight._rowwise_data
    if not any(base.__name__ == "MXFP8Tensor" for base in type(weight).__mro__):
        data = data.t() if columns else data
        return from_e4m3(data) * spread(weight._rowwise_scale_inv, (m, k), 128, 128)
    if columns:
        scales = from_e8m0(weight._columnwise_scale_inv[: m // 32, :k]).repeat_interleave(32, 0)
    else:
        scales = from_e8m0(weight._rowwise_scale_inv[:m, : k // 32]).repeat_interleave(32, 1)
    return from_e4m3(data) * scales
