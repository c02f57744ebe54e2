"""How far a sum in lower precision may be from the exact one.

Standard rounding-error analysis (N. Higham, Accuracy and Stability of Numerical Algorithms,
section 4.2): a sum of n numbers, in any order and with k roundings of unit roundoff u on the way
of each of them, is off by at most gamma(k, u) * sum |x_i|, gamma(k, u) = k u / (1 - k u).
"""

from __future__ import annotations

import torch

from megatron_fsdp_adapter.core.kernels.sums import sum_rows

U_FLOAT32 = 2.0**-24
U_BFLOAT16 = 2.0**-8
"""Unit roundoffs: half the distance from 1 to the next number, for 24 and 8 bits of significand."""


def gamma(roundings: int, unit: float) -> float:
    return roundings * unit / (1 - roundings * unit)


DTYPES = (torch.float32, torch.bfloat16)


def is_rounded_once(
    rows: torch.Tensor, output: torch.Tensor, scale: float, accumulate: bool
) -> bool:
    """Sums `rows` into `output`, and compares with the sum in float64."""
    expected = rows.double().sum(0) * scale
    size = rows.double().abs().sum(0) * abs(scale)
    if accumulate:
        expected = expected + output.double()
        size = size + output.double().abs()
    kept = output.dtype
    sum_rows(rows, output, scale, accumulate)
    of_sums, of_output = (torch.finfo(dtype).eps / 2 for dtype in (torch.float32, kept))
    bound = (len(rows) + 2) * of_sums * size + of_output * expected.abs() * 1.01
    return output.dtype == kept and bool(((output.double() - expected).abs() <= bound).all())
