"""Newton-Schulz iterations: every singular value of a matrix becomes about 1.

    P = a I + b R + c R R  with  R = X X^T,    X <- P X

One step applies the odd polynomial a s + b s^3 + c s^5 to the singular values of X, which begins as
the matrix over its Frobenius norm. Where X is tall, X^T X and X P stand for X X^T and P X.

In float32 each step is computed as it stands. In half precision the steps go on with the Gram
matrix R, which is the smaller one, and with the product Q of their polynomials,

    R <- P R P,    Q <- P Q

and X is multiplied by Q after the third step and after the last one: all else is small products,
most of them symmetric. A matrix that is nearly square has no small products: X is multiplied in
every step, which is less then.

After the third step R is computed again from X. Between, R has errors of a rounding of its largest
eigenvalue, which can make small eigenvalues negative and which every step multiplies by a^2.
Without the restart some matrices come out infinite, with one after the second or the fourth of five
steps errors are larger; after the third they are smaller than those of plain steps in bf16, for
matrices with singular values over four decades as well, and for one direction and noise
(`tests/sharding/test_newton_schulz.py`). Q is not symmetric but for rounding, and is not mirrored:
the errors of P then meet what the steps before have made small, as they do step by step; mirrored,
one direction and noise came out with ten times its norm. A tall X is multiplied by its transpose
for the same reason: by Q itself, 14336 x 4096 of one direction came out as not-a-number. The way
and the need to restart are those of Gram Newton-Schulz (J. Zhang, N. Amsel, B. Chen, T. Dao,
dao-lab.ai/blog/2026/gram-newton-schulz), which restarts after the second step, with other
coefficients.

Half precision is float16, of which all values here are in range: X is scaled to a root mean square
of 1 and R to a mean eigenvalue of 1 at first, by factors that the last product takes back. Its
roundings are an eighth of bf16's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle, islice

import torch

from .symmetric import product_into, symmetric_product

Coefficients = tuple[float, float, float]
"""(a, b, c) of one step."""

SIMPLE: tuple[Coefficients, ...] = ((3.4445, -4.7750, 2.0315),)
QUINTIC: tuple[Coefficients, ...] = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
COEFFICIENTS: Mapping[str, tuple[Coefficients, ...]] = {"simple": SIMPLE, "quintic": QUINTIC}
"""Published sets, for each step its own, from the first again where there are more steps. simple:
K. Jordan, https://kellerjordan.github.io/posts/muon/ (torch.optim.Muon's). quintic: K. Jordan's
modded-nanogpt, train_gpt_medium.py at commit 0674386, found by the method of
https://leloykun.github.io/ponder/muon-opt-coeffs/ (megatron-core's default)."""

EPS = 1e-7
LARGEST_SCALE = 1 << 13
"""Largest scale of the Gram matrix, whose eigenvalues are at most 1.5 times this; float16 ends at
65,504."""
SQUARE = 1.5
"""Up to this ratio of its sides a matrix is multiplied in every step. The products of five steps
take as long one way as the other at a ratio of 1.5, by their times on an H200."""


def coefficients_of(name: str, steps: int) -> tuple[Coefficients, ...]:
    """The coefficients of `steps` steps, one at least, of a set of `COEFFICIENTS`."""
    return tuple(islice(cycle(COEFFICIENTS[name]), steps))


def restarts_of(steps: int, rows: int, columns: int) -> tuple[int, ...]:
    """The steps, from 0, in front of which X and R are computed again: all, if the matrix is nearly
    square. Five steps need one restart. More steps than that are there for accuracy: every second
    one."""
    if max(rows, columns) <= SQUARE * min(rows, columns):
        return tuple(range(1, steps))
    return tuple(step for step in (3,) if step < steps) if steps <= 5 else tuple(range(2, steps, 2))


def result_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of what `orthogonalized` makes of matrices of a dtype."""
    return torch.float32 if dtype == torch.float32 else torch.float16


def orthogonalized(
    matrices: torch.Tensor, coefficients: Sequence[Coefficients], eps: float = EPS,
    in_place: bool = False,
) -> torch.Tensor:  # fmt: skip
    """The matrices with singular values of about 1; zeros stay zeros.

    matrices: (batch, rows, columns), float32, bf16 or float16. Returned is their shape, in
    `result_dtype`. The norm is summed in float32. A matrix's result does
    not depend on the others of its batch, so far as the device's GEMMs do not. in_place:
    the memory of `matrices` may be written.
    """
    norm = torch.linalg.vector_norm(matrices, dim=(1, 2), keepdim=True, dtype=torch.float32)
    norm = norm.clamp_min(eps)
    if matrices.dtype == torch.float32:
        return _stepwise(matrices / norm, coefficients)
    # Same places and sizes of elements: what is written has been read.
    matrices = matrices.contiguous()
    memory = matrices if in_place else torch.empty_like(matrices)
    numel = matrices.shape[1] * matrices.shape[2]
    x = torch.mul(matrices, numel**0.5 / norm, out=memory.view(torch.float16))
    return _by_gram_matrix(x, coefficients)


def _stepwise(x: torch.Tensor, coefficients: Sequence[Coefficients]) -> torch.Tensor:
    tall = x.shape[1] > x.shape[2]
    for a, b, c in coefficients:
        gram = symmetric_product(x, tall=tall)
        step = symmetric_product(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, *((x, step) if tall else (step, x)), beta=a)
    return x


def _by_gram_matrix(x: torch.Tensor, coefficients: Sequence[Coefficients]) -> torch.Tensor:
    """x: float16, with elements of a root mean square of 1, in memory that is written."""
    memory = [x, torch.empty_like(x)]  # to read from, and to write
    _, rows, columns = x.shape
    tall, restarts = rows > columns, restarts_of(len(coefficients), rows, columns)
    r_scale = float(min(rows, columns, LARGEST_SCALE))
    to_gram = r_scale / (rows * columns)
    gram, product = symmetric_product(x, alpha=to_gram, tall=tall), None
    for number, (a, b, c) in enumerate(coefficients):
        if number in restarts:
            x = _times(memory, product, 1.0, tall)
            gram, product = symmetric_product(x, alpha=to_gram, tall=tall), None
        step = symmetric_product(
            gram, gram, gram, beta=b / r_scale, alpha=c / r_scale**2, diagonal=a
        )
        product = step if product is None else product_into(torch.empty_like(step), step, product)
        if number + 1 < len(coefficients) and number + 1 not in restarts:
            gram = symmetric_product(step, symmetric_product(step, gram))
    return _times(memory, product, (rows * columns) ** -0.5, tall)


def _times(
    memory: list[torch.Tensor], product: torch.Tensor | None, factor: float, tall: bool
) -> torch.Tensor:
    """factor times `product` times the first of `memory`, which has been transposed if it is tall,
    in the second one; then they change places."""
    assert product is not None
    x, out = memory
    product_into(out, *((x, product.mT) if tall else (product, x)), alpha=factor)
    memory.reverse()
    return out


def cost(rows: int, columns: int, steps: int = 5) -> int:
    """Floating-point operations of `steps` steps in half precision, of symmetric products half."""
    small, large = sorted((rows, columns))
    passes = len(restarts_of(steps, rows, columns)) + 1
    # Of each pass of s steps: s polynomials, s - 1 whole products Q, 2 (s - 1) for the next R.
    inner = steps + 4 * (steps - passes)
    return passes * 3 * small * small * large + inner * small**3
