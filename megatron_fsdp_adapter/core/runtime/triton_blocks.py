"""The kernels of `blocks`. Imported where they are used: Triton comes with torch's CUDA builds
only."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .block_format import BLOCK, LARGEST_FINITE, NOT_FINITE

TILE, WARPS = 64, 4
"""Blocks and warps of a program: 2048 elements."""


@triton.jit
def _encode(
    source, rows, numel, width,
    TILE: tl.constexpr, BLOCK: tl.constexpr, LARGEST: tl.constexpr, NOT_FINITE: tl.constexpr,
):  # fmt: skip
    # 64 bits: the rows of one bucket can have more than 2**31 elements together.
    row = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    place = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = place < numel
    x = tl.load(source + row * numel + place, mask=inside, other=0.0).to(tl.float32)
    largest = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    up = (largest & 0x7FFFFF) > 0x600000
    exponent = tl.maximum((largest >> 23) - 8 + up.to(tl.int32), 1)
    finite = largest <= LARGEST
    inverse = ((254 - tl.minimum(exponent, 253)) << 23).to(tl.float32, bitcast=True)
    scaled = tl.where(finite[:, None], x * inverse[:, None], 0.0)
    coded = scaled.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    target = rows + row * width
    tl.store(target + place, coded, mask=inside)
    stored = tl.where(finite, exponent, NOT_FINITE).to(tl.uint8)
    tl.store(target + numel + block, stored, mask=block * BLOCK < numel)


@triton.jit
def _sum_encoded(
    rows, output, numel, width, scale,
    COUNT: tl.constexpr, ACCUMULATE: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    place = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = place < numel
    total = tl.zeros([TILE, BLOCK], tl.float32)
    for row in tl.static_range(0, COUNT):
        source = rows + tl.full((), row, tl.int64) * width
        coded = tl.load(source + place, mask=inside, other=0)
        power = tl.load(source + numel + block, mask=block * BLOCK < numel, other=0).to(tl.int32)
        value = coded.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        total += value * (power << 23).to(tl.float32, bitcast=True)[:, None]
    total *= scale
    if ACCUMULATE:
        total += tl.load(output + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(output + place, total.to(output.dtype.element_ty), mask=inside)


def encode(source: torch.Tensor, rows: torch.Tensor) -> None:
    """See `blocks.encode`. What pads a row stays what it was."""
    count, numel = source.shape
    if numel:
        grid = (triton.cdiv(numel, TILE * BLOCK), count)
        _encode[grid](
            source, rows, numel, rows.stride(0), TILE, BLOCK, LARGEST_FINITE, NOT_FINITE,
            num_warps=WARPS,
        )


def sum_encoded(
    rows: torch.Tensor, output: torch.Tensor, scale: float, accumulate: bool
) -> None:
    """See `blocks.sum_encoded`."""
    numel = output.numel()
    if numel:
        _sum_encoded[(triton.cdiv(numel, TILE * BLOCK),)](
            rows, output, numel, rows.stride(0), scale, rows.shape[0], accumulate, TILE, BLOCK,
            num_warps=WARPS,
        )
