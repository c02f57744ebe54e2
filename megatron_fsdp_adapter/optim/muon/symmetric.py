"""Products that are known to be symmetric.

On CUDA a Triton kernel computes half of such a product and mirrors it. Blocks of the BLAS on and
above the diagonal were turned down: they compute five eighths, in products that are too small for
the device, and every mirror image is a copy.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from ...kernels import kernel_or_warning

Kernel = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor | None, float, float, float, bool], torch.Tensor
]

SMALLEST = 256
"""Rows from which the kernel is used: below that a launch takes longer than a whole product."""
TILE = 128
"""The kernel takes tall matrices in whole tiles of so many rows and columns."""


def symmetric_product(
    x: torch.Tensor, y: torch.Tensor | None = None, added: torch.Tensor | None = None,
    beta: float = 0.0, alpha: float = 1.0, diagonal: float = 0.0, tall: bool = False,
) -> torch.Tensor:  # fmt: skip
    """alpha x y^T + beta added + diagonal I, which is to be symmetric but for rounding: y is x, or
    x and y are symmetric and commute. With `tall`, x^T y in the place of x y^T.

    x, y: (batch, n, k), or with `tall` (batch, k, n); added: (batch, n, n). Returns (batch, n, n)
    in their dtype, rounded once where the kernel computes it.
    """
    y = x if y is None else y
    kernel = _kernel(x.device) if _fits(x, tall) else None
    if kernel is not None:
        return kernel(x, y, added, beta, alpha, diagonal, tall)
    left, right = (x.mT, y) if tall else (x, y.mT)
    if added is None:
        n = left.shape[1]
        added = torch.empty(left.shape[0], n, n, dtype=x.dtype, device=x.device)
        beta = 0.0
    if _is_slow(x):
        found = _in_float32(left, right, alpha)
        found = (found.add_(added, alpha=beta) if beta else found).to(x.dtype)
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
    """A host's products of float16 take forty times as long as those of float32; both are added up
    in float32 and rounded once."""
    return x.dtype == torch.float16 and x.device.type == "cpu"


def _in_float32(left: torch.Tensor, right: torch.Tensor, alpha: float) -> torch.Tensor:
    return torch.bmm(left.float(), right.float()).mul_(alpha)


def _fits(x: torch.Tensor, tall: bool) -> bool:
    """True if the kernel may have it: shapes alone decide, so that each rank takes the same way."""
    n = x.shape[2] if tall else x.shape[1]
    return (
        x.is_cuda and x.dtype == torch.float16 and n >= SMALLEST and x.shape[2] % 8 == 0
        and (not tall or all(size % TILE == 0 for size in x.shape[1:]))
    )  # fmt: skip


@functools.cache
def _kernel(device: torch.device) -> Kernel | None:
    def tried() -> Kernel:
        from .triton_symmetric import symmetric_product as kernel

        x = torch.eye(SMALLEST, dtype=torch.float16, device=device)[None]
        for tall in (False, True):
            kernel(x, x, None, 0.0, 1.0, 0.0, tall)
        return kernel

    return kernel_or_warning(
        tried, "symmetric products of Muon are left to torch, which computes both halves"
    )
