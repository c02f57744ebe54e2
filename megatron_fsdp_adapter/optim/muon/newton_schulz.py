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
(`tests/optim/test_newton_schulz.py`). Q is not symmetric but for rounding, and is not mirrored:
the errors of P then meet what the steps before have made small, as they do step by step; mirrored,
one direction and noise came out with ten times its norm. A tall X is multiplied by its transpose
for the same reason: by Q itself, 14336 x 4096 of one direction came out as not-a-number. The way
and the need to restart are those of Gram Newton-Schulz (J. Zhang, N. Amsel, B. Chen, T. Dao,
dao-lab.ai/blog/2026/gram-newton-schulz), which restarts after the second step, with other
coefficients.

Half precision is float16, of which all values here are in range: X is scaled to a root mean square
of 1 and R to a mean eigenvalue of 1 at first, by factors that the last product takes back. Its
roundings are an eighth of bf16's.

Of products that are known to be symmetric a Triton kernel computes half on CUDA, and mirrors it.
Blocks of the BLAS on and above the diagonal were turned down: they compute five eighths, in
products that are too small for the device, and every mirror image is a copy.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle, islice

import torch

from ...core.kernels import kernel_or_warning

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
    """The steps, counted from 0, in front of which X and R are computed again:

    - All but the first, if the matrix is nearly square.
    - With up to five steps only step 3, if there is one: they need one restart.
    - With more steps every second one: they are there for accuracy.
    """
    if max(rows, columns) <= SQUARE * min(rows, columns):
        return tuple(range(1, steps))
    if steps > 5:
        return tuple(range(2, steps, 2))
    return (3,) if steps > 3 else ()


def result_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the result of `orthogonalized`, for matrices of `dtype`."""
    return torch.float32 if dtype == torch.float32 else torch.float16


def orthogonalized(
    matrices: torch.Tensor,
    coefficients: Sequence[Coefficients],
    eps: float = EPS,
    in_place: bool = False,
) -> torch.Tensor:
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
        left, right = (x, step) if tall else (step, x)
        x = torch.baddbmm(x, left, right, beta=a)
    return x


def _by_gram_matrix(x: torch.Tensor, coefficients: Sequence[Coefficients]) -> torch.Tensor:
    """Orthogonalizes x, which is overwritten: float16, with elements of a root mean square of 1."""
    memory = [x, torch.empty_like(x)]  # to read from, and to write
    _, rows, columns = x.shape
    numel = rows * columns
    tall = rows > columns
    steps = len(coefficients)
    restarts = restarts_of(steps, rows, columns)
    r_scale = float(min(rows, columns, LARGEST_SCALE))
    to_gram = r_scale / numel
    gram = symmetric_product(x, alpha=to_gram, tall=tall)
    product: torch.Tensor | None = None
    for number, (a, b, c) in enumerate(coefficients):
        if number in restarts:
            x = _times(memory, product, 1.0, tall)
            gram = symmetric_product(x, alpha=to_gram, tall=tall)
            product = None
        beta = b / r_scale
        alpha = c / r_scale**2
        step = symmetric_product(gram, gram, gram, beta=beta, alpha=alpha, diagonal=a)
        if product is None:
            product = step
        else:
            product = product_into(torch.empty_like(step), step, product)
        following = number + 1
        if following < steps and following not in restarts:
            gram = symmetric_product(step, symmetric_product(step, gram))
    return _times(memory, product, numel**-0.5, tall)


def _times(
    memory: list[torch.Tensor], product: torch.Tensor | None, factor: float, tall: bool
) -> torch.Tensor:
    """factor times `product` times x, the first of `memory`; with `tall`, x times the transpose of
    `product`. It is written to the second of `memory`; then the two change places."""
    assert product is not None
    x, out = memory
    left, right = (x, product.mT) if tall else (product, x)
    product_into(out, left, right, alpha=factor)
    memory.reverse()
    return out


def cost(rows: int, columns: int, steps: int = 5) -> int:
    """A measure of the operations of `steps` steps in half precision. Symmetric products count
    half."""
    small, large = sorted((rows, columns))
    passes = len(restarts_of(steps, rows, columns)) + 1
    outer = 3 * small * small * large
    # Of each pass of s steps: s polynomials, s - 1 whole products Q, 2 (s - 1) for the next R.
    inner = steps + 4 * (steps - passes)
    return passes * outer + inner * small**3


ProductKernel = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor | None, float, float, float, bool], torch.Tensor
]

SMALLEST = 256
"""Rows from which the kernel is used: below that a launch takes longer than a whole product."""
TILE = 128
"""The kernel takes tall matrices in whole tiles of so many rows and columns."""


def symmetric_product(
    x: torch.Tensor,
    y: torch.Tensor | None = None,
    added: torch.Tensor | None = None,
    beta: float = 0.0,
    alpha: float = 1.0,
    diagonal: float = 0.0,
    tall: bool = False,
) -> torch.Tensor:
    """alpha x y^T + beta added + diagonal I; with `tall`, x^T y in the place of x y^T. It must be
    symmetric but for rounding: y is x, or x and y are symmetric and commute.

    x, y: (batch, n, k), or with `tall` (batch, k, n); added: (batch, n, n). Returns (batch, n, n)
    in their dtype, rounded once where the kernel computes it.
    """
    if y is None:
        y = x
    kernel = _kernel(x.device) if _fits(x, tall) else None
    if kernel is not None:
        return kernel(x, y, added, beta, alpha, diagonal, tall)
    left, right = (x.mT, y) if tall else (x, y.mT)
    if added is None:
        n = left.shape[1]
        added = torch.empty(left.shape[0], n, n, dtype=x.dtype, device=x.device)
        beta = 0.0
    if _is_slow(x):
        total = _in_float32(left, right, alpha)
        if beta:
            total.add_(added, alpha=beta)
        found = total.to(x.dtype)
    else:
        found = torch.baddbmm(added, left, right, beta=beta, alpha=alpha)
    if diagonal:
        found.diagonal(dim1=1, dim2=2).add_(diagonal)
    return found


def product_into(
    out: torch.Tensor, left: torch.Tensor, right: torch.Tensor, alpha: float = 1.0
) -> torch.Tensor:
    """`out` becomes alpha left right, all (batch, rows, columns) of one dtype."""
    if _is_slow(left):
        return out.copy_(_in_float32(left, right, alpha))
    return out.baddbmm_(left, right, beta=0.0, alpha=alpha)


def _is_slow(x: torch.Tensor) -> bool:
    """True for float16 on the host, whose products take forty times as long as those of float32.
    The result is the same: both are added up in float32 and rounded once."""
    return x.dtype == torch.float16 and x.device.type == "cpu"


def _in_float32(left: torch.Tensor, right: torch.Tensor, alpha: float) -> torch.Tensor:
    return torch.bmm(left.float(), right.float()).mul_(alpha)


def _fits(x: torch.Tensor, tall: bool) -> bool:
    """True if the kernel takes x. Values do not decide, so that each rank goes the same way."""
    if not x.is_cuda or x.dtype != torch.float16:
        return False
    _, rows, columns = x.shape
    if tall:
        return columns >= SMALLEST and rows % TILE == 0 and columns % TILE == 0
    return rows >= SMALLEST and columns % 8 == 0


@functools.cache
def _kernel(device: torch.device) -> ProductKernel | None:
    def tried() -> ProductKernel:
        from .triton_symmetric import symmetric_product as kernel

        x = torch.eye(SMALLEST, dtype=torch.float16, device=device)[None]
        for tall in (False, True):
            kernel(x, x, None, 0.0, 1.0, 0.0, tall)
        return kernel

    return kernel_or_warning(
        tried, "symmetric products of Muon are left to torch, which computes both halves"
    )
