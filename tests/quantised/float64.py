"""NVFP4 and MXFP8 from the definitions of their numbers, in float64: each element goes to the
nearest of the numbers that there are. Nothing is shared with what computes in float32.

What Transformer Engine keeps in float32 on the way is rounded to that here too: quotients and
products of float32 numbers, computed in float64 and rounded then, are those rounded once.
"""

from __future__ import annotations

import numpy as np
import torch

LARGEST, TINY = np.finfo(np.float32).max, np.finfo(np.float32).tiny


def _numbers(exponent_bits: int, mantissa_bits: int, bias: int) -> np.ndarray:
    """The value of every code without a sign, in order, special ones included."""
    codes = np.arange(1 << (exponent_bits + mantissa_bits))
    exponent, mantissa = codes >> mantissa_bits, codes & ((1 << mantissa_bits) - 1)
    fraction = mantissa / (1 << mantissa_bits) + (exponent > 0)
    return fraction * 2.0 ** (np.maximum(exponent, 1) - bias)


E2M1 = _numbers(2, 1, 1)
E4M3 = _numbers(4, 3, 7)[:-1]  # the last is NaN
assert E2M1.max() == 6 and E4M3.max() == 448


def nearest(values: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Codes, without signs, of the numbers nearest to float64 `values`; of two the even one. What
    is larger than all is the largest; NaN too."""
    size = np.abs(values)
    above = np.clip(np.searchsorted(numbers, size), 1, len(numbers) - 1)
    up, down = numbers[above] - size, size - numbers[above - 1]
    code = np.where((up < down) | ((up == down) & (above % 2 == 0)), above, above - 1)
    return np.where(size <= numbers[-1], code, len(numbers) - 1)


def rounded(value: np.ndarray | float) -> np.ndarray:
    """To float32 and back."""
    with np.errstate(over="ignore"):
        return np.asarray(value, np.float64).astype(np.float32).astype(np.float64)


def _spread(blocks: np.ndarray, rows: int, columns: int) -> np.ndarray:
    return np.repeat(np.repeat(blocks, rows, 0), columns, 1)


def _amax(values: np.ndarray, rows: int, columns: int) -> np.ndarray:
    size = np.nan_to_num(np.abs(values), nan=0.0, posinf=np.inf)
    m, k = values.shape
    return size.reshape(m // rows, rows, k // columns, columns).max((1, 3))


def _bytes(found: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(found).astype(np.uint8))


def nvfp4(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of a whole weight (M, K), rounded to its nominal dtype: planes by name, and `amax` (1,)."""
    values = weight.detach().cpu().double().numpy()
    tiles = _amax(values, 16, 16)
    amax = tiles.max()
    with np.errstate(all="ignore"):
        encode = min(rounded(2688 / max(amax, TINY)), LARGEST) if amax > 0 else 1.0
        scale = rounded(tiles * rounded(encode * rounded(1 / 6)))
        scale = np.minimum(np.where(np.isnan(scale), LARGEST, scale), LARGEST)
        scales = nearest(scale, E4M3)
        decode = rounded(1 / (encode if encode > 0 else 1.0))
        factor = np.minimum(rounded(1 / rounded(E4M3[scales] * decode)), LARGEST)
        factor = np.where(scales > 0, factor, LARGEST)
        scaled = rounded(values * _spread(factor, 16, 16))
    sign = np.where(np.isnan(scaled), 0, np.signbit(scaled) * 8)
    codes = nearest(scaled, E2M1) + sign
    return {
        "rowwise": _bytes(codes[:, ::2] + 16 * codes[:, 1::2]),
        "rowwise_scales": _bytes(np.repeat(scales, 16, 0)),
        "amax": torch.tensor([amax], dtype=torch.float32),
    }


def nvfp4_values(planes: dict[str, torch.Tensor]) -> np.ndarray:
    """What these planes stand for, exactly."""
    data = planes["rowwise"].numpy().astype(int)
    codes = np.stack([data & 15, data >> 4], -1).reshape(len(data), -1)
    signed = np.concatenate([E2M1, -E2M1])
    scales = np.repeat(E4M3[planes["rowwise_scales"].numpy()], 16, 1)
    return signed[codes] * scales * planes["amax"].double().item() / 2688


def mxfp8(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """All planes of a whole weight (M, K), rounded to its nominal dtype."""
    values = weight.detach().cpu().double().numpy()
    found = {}
    for name, block in (("rowwise", (1, 32)), ("columnwise", (32, 1))):
        share = rounded(_amax(values, *block) * rounded(1 / 448))
        fraction, power = np.frexp(np.where(np.isfinite(share), share, 1.0))
        exponent = np.where(fraction == 0.5, power - 1, power) + 127  # of the power not below it
        exponent = np.where(share == 0, 0, np.where(np.isinf(share), 254, exponent))
        exponent = np.clip(exponent, 0, 254)
        with np.errstate(all="ignore"):
            scaled = rounded(values * _spread(2.0 ** (127.0 - exponent), *block))
        sign = np.signbit(scaled) * 0x80
        codes = np.where(np.isnan(scaled), 0x7F, nearest(scaled, E4M3) + sign)
        found |= {name: _bytes(codes), f"{name}_scales": _bytes(exponent)}
    return found
