"""How whole weights are quantized: what shards are compared with.

As Transformer Engine's kernels do it, with torch's operations: values are rounded to the weight's
dtype, multiplied by a scale, and rounded to 8 bits (E4M3, to nearest even, saturating).
"""

from __future__ import annotations

import math
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


def amax_of(values: torch.Tensor) -> float:
    """Of numbers: NaN does not count."""
    if values.numel():
        return float(values.abs().nan_to_num(0.0, math.inf).max())
    return 0.0


def scale_of(amax: float, powers: bool = False, epsilon: float = 0.0) -> float:
    """448 / amax; 1 where there is nothing to scale, or too much."""
    amax = max(amax, epsilon)
    if amax == 0 or math.isinf(amax):
        return 1.0
    found = torch.tensor(MAX) / torch.tensor(amax)
    scale = min(found.item(), F32_MAX)
    return 2.0 ** math.floor(math.log2(scale)) if powers else scale


def scales_of(amaxes: torch.Tensor, powers: bool = False, epsilon: float = 0.0) -> torch.Tensor:
    """The scale of each amax."""
    found = [scale_of(one, powers, epsilon) for one in amaxes.flatten().tolist()]
    return torch.tensor(found, device=amaxes.device).view(amaxes.shape)


# One scale for 128 x 128.


def spread(blocks: torch.Tensor, shape: tuple[int, int], rows: int, columns: int) -> torch.Tensor:
    """The value of its block for each element of a weight of `shape`."""
    full = blocks.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    return full[: shape[0], : shape[1]]


def block128(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes and inverse scales of a whole weight; those have shape ceil(M / 128), ceil(K / 128)."""
    rows, columns = weight.shape
    padded = torch.zeros(up(rows, 128), up(columns, 128))
    padded[:rows, :columns] = weight.abs().nan_to_num(0.0, math.inf)
    blocks = padded.view(up(rows, 128) // 128, 128, up(columns, 128) // 128, 128)
    scale = scales_of(blocks.amax((1, 3)), True)
    return e4m3(weight * spread(scale, (rows, columns), 128, 128)), 1.0 / scale


# One scale (E8M0) for 32 elements.


def e8m0(value: torch.Tensor) -> torch.Tensor:
    bits = value.view(torch.int32)
    exponent = (bits >> 23) & 0xFF
    mantissa = bits & 0x7FFFFF
    small = (exponent == 0) & (mantissa <= 0x400000)
    more = (mantissa > 0) & (exponent != 0xFE) & ~small
    found = torch.where(more, exponent + 1, exponent)
    return torch.where(value == 0, torch.zeros_like(found), found).clamp(max=254).to(torch.uint8)


def mxfp8(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """All planes of a whole weight (M, K)."""
    m, k = weight.shape
    found = {}
    for name, groups, dim in (
        ("rowwise", weight.view(m, k // 32, 32), 2),
        ("columnwise", weight.view(m // 32, 32, k), 1),
    ):
        amaxes = groups.abs().nan_to_num(0.0, math.inf).amax(dim)
        found[f"{name}_scales"] = e8m0(amaxes * torch.tensor(1 / MAX))
        factors = torch.pow(2.0, 127.0 - found[f"{name}_scales"].double()).float()
        found[name] = e4m3(groups * factors.unsqueeze(dim)).view(m, k)
    return found


def from_e8m0(scale: torch.Tensor) -> torch.Tensor:
    exponent = scale.to(torch.int32)
    tiny = torch.full_like(exponent, 0x400000)
    return torch.where(exponent == 0, tiny, exponent << 23).view(torch.float32)


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
