"""Sums over ranks that this package takes itself, of the pieces that an exchange brings.

On CUDA a Triton kernel reads every piece once and writes, or adds to, the shard: one pass, in
float32, in the order of the ranks. Torch's own reduction over a first dimension of 2 to 8 rows
moves 2.0 to 3.9 TB/s of an H200's 4.3, and adding its result to the shard is one pass more: for a
layer of 218M gradients on 4 ranks 0.45 ms in place of 0.30.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .kernels import kernel_or_warning

SumRows = Callable[[torch.Tensor, torch.Tensor, float, bool], None]


def sum_rows(
    rows: torch.Tensor, output: torch.Tensor, scale: float = 1.0, accumulate: bool = False
) -> None:
    """`output` (n) becomes, or with `accumulate` grows by, `scale` times the sum of `rows` (r, n).

    Both may be float32 or bfloat16; additions are in float32, the result is rounded once.
    """
    run = _kernel(rows.device) if rows.is_cuda else None
    (run or _by_torch)(rows, output, scale, accumulate)


def _by_torch(
    rows: torch.Tensor, output: torch.Tensor, scale: float, accumulate: bool
) -> None:
    if accumulate:
        output.add_(torch.sum(rows, dim=0, dtype=torch.float32), alpha=scale)
    elif output.dtype == torch.float32:
        torch.sum(rows, dim=0, dtype=torch.float32, out=output)
        if scale != 1.0:
            output.mul_(scale)
    else:
        output.copy_(torch.sum(rows, dim=0, dtype=torch.float32).mul_(scale))


@functools.cache
def _kernel(device: torch.device) -> SumRows | None:
    def tried() -> SumRows:
        from .triton_sums import sum_rows as kernel

        kernel(torch.zeros(1, 1, device=device), torch.zeros(1, device=device), 1.0, False)
        return kernel

    return kernel_or_warning(
        tried, "sums of exchanged gradients are left to torch, which takes half as long again"
    )


@dataclass(frozen=True)
class SumsOfReceived:
    """A handle that adds up what the ranks sent, one row each, when it is waited for. `work` is
    the exchange; None where the current stream orders it, or there was none."""

    work: Any
    received: torch.Tensor
    output: torch.Tensor
    scale: float
    accumulate: bool

    def wait(self) -> None:
        if self.work is not None:
            self.work.wait()
        sum_rows(self.received, self.output, self.scale, self.accumulate)
