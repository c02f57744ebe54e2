"""How far a sum in lower precision may be from the exact one.

Standard rounding-error analysis (N. Higham, Accuracy and Stability of Numerical Algorithms,
section 4.2): a sum of n numbers, in any order and with k roundings of unit roundoff u on the way
of each of them, is off by at most gamma(k, u) * sum |x_i|, gamma(k, u) = k u / (1 - k u).
"""

from __future__ import annotations

U_FLOAT32 = 2.0**-24
U_BFLOAT16 = 2.0**-8
"""Unit roundoffs: half the distance from 1 to the next number, for 24 and 8 bits of significand."""


def gamma(roundings: int, unit: float) -> float:
    return roundings * unit / (1 - roundings * unit)
