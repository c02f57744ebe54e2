"""Newton-Schulz iterations: every singular value of a matrix becomes about 1.

    A = X X^T,  B = b A + c A A,  X <- a X + B X

One step applies the odd polynomial a s + b s^3 + c s^5 to the singular values of X, which begins as
the matrix over its Frobenius norm. A and B are symmetric, so that of each only the blocks on and
above the diagonal are computed: five eighths of the product, with four blocks a side. A symmetric
product of the BLAS (syrk) is not to be had for bf16 in torch, and a kernel of our own was left out:
blocks need none, and run on every device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle, islice

import torch

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
BLOCKS, MIN_BLOCK = 4, 256
"""Blocks a side of a symmetric product, and the rows that one has at least: smaller products leave
a device idle."""


def coefficients_of(name: str, steps: int) -> tuple[Coefficients, ...]:
    """The coefficients of `steps` steps. ValueError for a name that is not in `COEFFICIENTS`, or
    less than one step."""
    if name not in COEFFICIENTS:
        raise ValueError(f"coefficients {name!r} are none of {sorted(COEFFICIENTS)}")
    if steps < 1:
        raise ValueError(f"{steps} Newton-Schulz steps: there is at least one")
    return tuple(islice(cycle(COEFFICIENTS[name]), steps))


def orthogonalised(
    matrices: torch.Tensor, coefficients: Sequence[Coefficients], eps: float = EPS,
    blocks: int = BLOCKS,
) -> torch.Tensor:  # fmt: skip
    """The matrices with singular values of about 1; zeros stay zeros.

    matrices: (batch, rows, columns); all products are in its dtype, bf16 or float32, and what is
    returned has its shape and dtype. The norm is summed in float32. A matrix's result does not
    depend on the others of its batch. blocks: a side of a symmetric product; 1 computes all of it.
    ValueError for another number of dimensions.
    """
    if matrices.dim() != 3:
        raise ValueError(f"matrices of shape {tuple(matrices.shape)}: (batch, rows, columns)")
    tall = matrices.shape[1] > matrices.shape[2]
    norm = torch.linalg.vector_norm(matrices, dim=(1, 2), keepdim=True, dtype=torch.float32)
    x = matrices / norm.clamp_min(eps).to(matrices.dtype)
    x = x.mT.contiguous() if tall else x
    for a, b, c in coefficients:
        gram = symmetric_product(x, blocks=blocks)
        polynomial = symmetric_product(gram, gram, b, c, blocks)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x.mT.contiguous() if tall else x


def symmetric_product(
    x: torch.Tensor, added: torch.Tensor | None = None, beta: float = 0.0, alpha: float = 1.0,
    blocks: int = BLOCKS,
) -> torch.Tensor:  # fmt: skip
    """alpha x x^T + beta added, for symmetric `added`: (batch, rows, rows), exactly symmetric."""
    rows = x.shape[1]
    size = max(-(-rows // blocks), min(MIN_BLOCK, rows))
    found = x.new_empty(x.shape[0], rows, rows)
    for start in range(0, rows, size):
        stop = min(start + size, rows)
        top, right = x[:, start:stop], x[:, start:].mT
        if added is None:
            block = torch.bmm(top, right)
        else:
            block = torch.baddbmm(added[:, start:stop, start:], top, right, beta=beta, alpha=alpha)
        found[:, start:stop, start:] = block
        found[:, stop:, start:stop] = block[:, :, stop - start :].mT
    return found


def cost(rows: int, columns: int, steps: int = 5) -> int:
    """Floating-point operations of `steps` steps, up to the part that symmetry saves."""
    small, large = sorted((rows, columns))
    return steps * (4 * small * small * large + 2 * small**3)
