"""Sums of rows and casts of large tensors.

On CUDA a Triton kernel reads every row once and writes, or adds to, the output: one pass, in
float32, in the order of the rows. Torch's own reduction over a first dimension of 2 to 8 rows is
slower, and adding its result to the output is one pass more
(docs/contributing/results_experiments.md).
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from . import kernel_or_warning

SumRows = Callable[[torch.Tensor, torch.Tensor, float, bool], None]

WIDE = 1 << 24
"""Elements from which a cast by the Triton kernel saves more time on the device than its launch
costs on the host."""


def sum_rows(
    rows: torch.Tensor, output: torch.Tensor, scale: float = 1.0, accumulate: bool = False
) -> None:
    """`output` (n) becomes, or with `accumulate` grows by, `scale` times the sum of `rows` (r, n).

    Both may be float32 or bfloat16; additions are in float32, the result is rounded once. To an
    output in float64 sums are added in that.
    """
    run = None
    if rows.is_cuda and output.dtype != torch.float64:
        run = _kernel(rows.device)
    if run is None:
        run = _by_torch
    run(rows, output, scale, accumulate)


def copy_large(output: torch.Tensor, value: torch.Tensor) -> None:
    """`output` becomes `value`, cast.

    Torch casts bfloat16 to float32 at half of the memory's speed. The sum of one row is a copy.
    """
    run = _kernel(value.device) if _is_slow_cast(output, value) else None
    if run is None:
        output.copy_(value)
    else:
        run(value.view(1, -1), output.view(-1), 1.0, False)


def _is_slow_cast(output: torch.Tensor, value: torch.Tensor) -> bool:
    """True for a large cast on the device for which the kernel is faster, and that it can do."""
    if not value.is_cuda or not output.is_cuda or value.numel() < WIDE:
        return False
    if value.dtype != torch.bfloat16 or output.dtype != torch.float32:
        return False
    return value.is_contiguous() and output.is_contiguous()


def _by_torch(rows: torch.Tensor, output: torch.Tensor, scale: float, accumulate: bool) -> None:
    total = torch.sum(rows, dim=0, dtype=torch.float32)
    if accumulate:
        output.add_(total, alpha=scale)
    else:
        output.copy_(total.mul_(scale))


@functools.cache
def _kernel(device: torch.device) -> SumRows | None:
    def tried() -> SumRows:
        from .triton_sums import sum_rows as kernel

        output = torch.zeros(1, dtype=torch.float32, device=device)
        kernel(output.view(1, 1).clone(), output, 1.0, False)
        return kernel

    return kernel_or_warning(
        tried,
        "sums of exchanged gradients are left to torch, which takes half as long again, "
        "and casts of gradients, which take twice as long",
    )
