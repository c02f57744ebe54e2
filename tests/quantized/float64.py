"""MXFP8 from the definition of its numbers, in float64: each element goes to the
nearest of the numbers that there are. Nothing is shared with what computes in float32.

What Transformer Engine keeps in float32 on the way is rounded to that here too: quotients and
products of float32 numbers, computed in float64 and rounded then, are those rounded once.
"""

from __future__ import annotations

import numpy as np
import torch


def _numbers(exponent_bits: int, mantissa_bits: int, bias: int) -> np.ndarray:
    """The value of every code without a sign, in order, special ones included."""
    codes = np.arange(1 << (exponent_bits + mantissa_bits))
    exponent, mantissa = codes >> mantissa_bits, codes & ((1 << mantissa_bits) - 1)
    fraction = mantissa / (1 << mantissa_bits) + (exponent > 0)
    return fraction * 2.0 ** (np.maximum(exponent, 1) - bias)


E4M3 = _numbers(4, 3, 7)[:-1]  # the last is NaN
assert E4M3.max() == 448


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
