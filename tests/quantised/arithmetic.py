"""How whole weights are quantised, in five recipes: what shards are compared with.

As Transformer Engine's kernels do it, with torch's operations: values are rounded to the weight's
dtype, multiplied by a scale, and rounded to 8 bits (E4M3, to nearest even, saturating) or 4 (E2M1).
"""

from __future__ import annotations

import torch

MAX = 448.0
F32_MAX = torch.finfo(torch.float32).max


def up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def e4m3(values: torch.Tensor) -> torch.Tensor:
    """Bytes."""
    return values.clamp(-MAX, MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def from_e4m3(data: torch.Tensor) -> torch.Tensor:
    return data.view(torch.float8_e4m3fn).float()


def scale_of(amax: torch.Tensor, power_of_two: bool = False) -> torch.Tensor:
    """448 / amax; 1 where there is nothing to scale, or too much."""
    scale = torch.where((amax == 0) | ~torch.isfinite(amax), torch.ones_like(amax), MAX / amax)
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


# One scale (E4M3) for 16 x 16, and one a weight.

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def e2m1(values: torch.Tensor) -> torch.Tensor:
    """Codes from 0 to 15, to nearest even, saturating."""
    size = values.abs().clamp(max=6.0)
    below = (torch.bucketize(size, E2M1, right=True) - 1).clamp(0, 7)
    above = (below + 1).clamp(max=7)
    down, more = size - E2M1[below], E2M1[above] - size
    code = torch.where((more < down) | ((more == down) & (above % 2 == 0)), above, below)
    return (code + 8 * values.signbit()).to(torch.uint8)


def packed(codes: torch.Tensor) -> torch.Tensor:
    """Two in a byte, the first in the low half."""
    return codes[:, ::2] | (codes[:, 1::2] << 4)


def unpacked(data: torch.Tensor) -> torch.Tensor:
    return torch.stack((data & 15, data >> 4), 2).flatten(1)


def from_e2m1(codes: torch.Tensor) -> torch.Tensor:
    sign = torch.where(codes >= 8, -1.0, 1.0)
    return sign * E2M1[(codes % 8).long()]


def nvfp4_global(amax: torch.Tensor) -> torch.Tensor:
    """The scale of scales."""
    scale = (torch.tensor(MAX * 6.0) / amax.clamp(min=torch.finfo().tiny)).clamp(max=F32_MAX)
    return torch.where(amax == 0, torch.ones_like(amax), scale)


def nvfp4(weight: torch.Tensor, amax: torch.Tensor) -> dict[str, torch.Tensor]:
    """Both planes, of a whole weight or of 16 n rows of one. amax: of the whole weight."""
    rows, columns = weight.shape
    tiles = weight.view(rows // 16, 16, columns // 16, 16).abs().amax((1, 3))
    encode = nvfp4_global(amax)
    sixth = torch.tensor(1.0) / 6
    # An infinite amax leaves a scale to the tiles that have it, and none to others.
    scales = e4m3((tiles * (encode * sixth)).nan_to_num(nan=F32_MAX).clamp(max=F32_MAX))
    decoded = from_e4m3(scales)
    decode = 1 / torch.where(encode > 0, encode, torch.ones_like(encode))
    encode = torch.where(decoded == 0, torch.inf, 1 / (decoded * decode)).clamp(max=F32_MAX)
    codes = e2m1(weight * encode.repeat_interleave(16, 0).repeat_interleave(16, 1))
    return {"rowwise": packed(codes), "rowwise_scales": scales.repeat_interleave(16, 0)}
