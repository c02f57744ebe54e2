"""Gradients on the wire in 8 bits: e4m3 in blocks of 32 that share a power of two as their scale.

What one rank sends another, of `numel` elements, is a row of bytes:

    [ e4m3, one byte an element | E8M0, one byte a block | padding to 16 ]

The scale of a block is the smallest power of two by which its largest element is at most 448, the
largest of e4m3: dividing by it is exact, and nothing saturates. So an element x of a block whose
largest is m is off by at most max(|x| / 16, m * 2**-17): half a unit in the last of three bits, or
of the smallest subnormal. A block with an element that is not finite arrives as NaN. Zero stays
zero. Whoever receives the rows adds them up in float32, in the order of the ranks.

The format is that of MX (OCP), but for the scale, which is rounded up there where an element would
saturate. Stochastic rounding was left out: it needs random numbers that are the same in a replayed
CUDA graph and after a resume, and to nearest the errors of blocks are as good as independent.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .block_format import BLOCK, LARGEST_FINITE, NOT_FINITE, row_bytes
from .kernels import kernel_or_warning

Encode = Callable[[torch.Tensor, torch.Tensor], None]
SumEncoded = Callable[[torch.Tensor, torch.Tensor, float, bool], None]


def encode(source: torch.Tensor, rows: torch.Tensor) -> None:
    """`source` (r, n), float32 or bfloat16 and contiguous, into `rows` (r, row_bytes(n)), uint8."""
    kernels = _kernels(source.device) if source.is_cuda else None
    (kernels[0] if kernels else encode_by_torch)(source, rows)


def sum_encoded(
    rows: torch.Tensor, output: torch.Tensor, scale: float = 1.0, accumulate: bool = False
) -> None:
    """`output` (n), float32 or bfloat16, becomes, or with `accumulate` grows by, `scale` times the
    sum of what `rows` (r, row_bytes(n)) stand for; additions in float32, rounded once."""
    kernels = _kernels(rows.device) if rows.is_cuda else None
    (kernels[1] if kernels else sum_by_torch)(rows, output, scale, accumulate)


def encode_by_torch(source: torch.Tensor, rows: torch.Tensor) -> None:
    count, numel = source.shape
    blocks = -(-numel // BLOCK)
    padded = torch.zeros(count, blocks * BLOCK, device=source.device)
    padded[:, :numel] = source
    each = padded.view(count, blocks, BLOCK)
    largest = (each.view(torch.int32) & 0x7FFFFFFF).amax(-1) if numel else each.new_zeros(count, 0)
    largest = largest.to(torch.int32)
    exponent = (largest >> 23) - 8 + ((largest & 0x7FFFFF) > 0x600000)
    exponent = exponent.clamp(min=1).to(torch.int32)
    finite = largest <= LARGEST_FINITE
    inverse = ((254 - exponent.clamp(max=253)) << 23).view(torch.float32)
    scaled = torch.where(finite[..., None], each * inverse[..., None], 0.0)
    coded = scaled.to(torch.float8_e4m3fn).view(torch.uint8).view(count, -1)
    rows[:, :numel] = coded[:, :numel]
    rows[:, numel : numel + blocks] = torch.where(finite, exponent, NOT_FINITE).to(torch.uint8)
    rows[:, numel + blocks :] = 0


def sum_by_torch(
    rows: torch.Tensor, output: torch.Tensor, scale: float, accumulate: bool
) -> None:
    numel = output.numel()
    blocks = -(-numel // BLOCK)
    total = torch.zeros(numel, device=output.device)
    for row in rows:
        values = row[:numel].view(torch.float8_e4m3fn).float()
        powers = (row[numel : numel + blocks].to(torch.int32) << 23).view(torch.float32)
        total += values * powers.repeat_interleave(BLOCK)[:numel]
    total *= scale
    output.copy_(total + output if accumulate else total)


@functools.cache
def _kernels(device: torch.device) -> tuple[Encode, SumEncoded] | None:
    def tried() -> tuple[Encode, SumEncoded]:
        from . import triton_blocks as kernels

        source, output = torch.ones(1, 48, device=device), torch.zeros(48, device=device)
        rows = torch.zeros(1, row_bytes(48), dtype=torch.uint8, device=device)
        kernels.encode(source, rows)
        kernels.sum_encoded(rows, output, 1.0, False)
        return kernels.encode, kernels.sum_encoded

    return kernel_or_warning(tried, "gradients are made 8-bit blocks by torch, in several passes")


@dataclass(frozen=True)
class SumsOfEncoded:
    """A handle that adds up the `rows` that the ranks sent, when it is waited for. `work` is the
    exchange; None where the current stream orders it."""

    work: Any
    rows: torch.Tensor
    output: torch.Tensor
    scale: float
    accumulate: bool

    def wait(self) -> None:
        if self.work is not None:
            self.work.wait()
        sum_encoded(self.rows, self.output, self.scale, self.accumulate)


def send_and_receive_rows(
    count: int, numel: int, device: torch.device, memory: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows (count, row_bytes(numel)) to send and to receive, in `memory` (uint8) if that is there
    and large enough."""
    width = row_bytes(numel)
    both = memory
    if both is None or both.numel() < 2 * count * width:
        both = torch.empty(2 * count * width, dtype=torch.uint8, device=device)
    sent, received = both[: 2 * count * width].view(2, count, width)
    return sent, received
