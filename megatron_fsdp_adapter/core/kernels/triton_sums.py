"""The kernel that sums rows. Imported where it is used: CPU builds of torch have no Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Elements and warps of a program. With up to 4 rows, 1024 to 8192 elements and 4 or 8 warps were
# all within 3% of each other; with 8 rows, 4096 elements or more were 6% slower (H200).
BLOCK = 2048
WARPS = 8


@triton.jit
def _sum_rows(
    rows,
    output,
    numel,
    stride,
    scale,
    COUNT: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # 64 bits: the rows of one bucket can have more than 2**31 elements together.
    start = tl.program_id(0).to(tl.int64) * BLOCK
    place = start + tl.arange(0, BLOCK)
    inside = place < numel
    value = tl.load(rows + place, mask=inside, other=0.0)
    total = value.to(tl.float32)
    for row in tl.static_range(1, COUNT):
        offset = tl.full((), row, tl.int64) * stride
        value = tl.load(rows + offset + place, mask=inside, other=0.0)
        total += value.to(tl.float32)
    total *= scale
    if ACCUMULATE:
        before = tl.load(output + place, mask=inside, other=0.0)
        total += before.to(tl.float32)
    tl.store(output + place, total.to(output.dtype.element_ty), mask=inside)


def sum_rows(rows: torch.Tensor, output: torch.Tensor, scale: float, accumulate: bool) -> None:
    """Sums rows, as `sums.sum_rows`. `rows` must be contiguous along their second
    dimension, and so must `output`; all on the current CUDA device."""
    count, numel = rows.shape
    if numel:
        blocks = triton.cdiv(numel, BLOCK)
        _sum_rows[(blocks,)](
            rows, output, numel, rows.stride(0), scale, count, accumulate, BLOCK, num_warps=WARPS
        )
