"""The kernel of `one_pass_norm`. Imported where it is used: Triton comes with torch's CUDA builds
only."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from .tensor_table import Table

BLOCK, WARPS, STAGES = 4096, 8, 1
"""Lanes of a program, which adds up a number in each at a time; its warps, and loads under way
beside those of all lanes."""

TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}


@triton.jit
def _sums_of_squares(
    addresses, tensor_of, first_of, count, sums,
    VALUE: tl.constexpr, ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    number = tl.load(tensor_of + tl.program_id(0))
    # 64 bits: a tensor can have more than 2**31 elements.
    start = (tl.program_id(0) - tl.load(first_of + number)).to(tl.int64) * CHUNK
    values = tl.load(addresses + number).to(tl.pointer_type(VALUE))
    end = tl.minimum(tl.load(addresses + count + number), start + CHUNK)
    if ALIGNED:
        values = tl.multiple_of(values, 16)
        end = tl.multiple_of(end, 8)
    lanes = tl.zeros((BLOCK,), tl.float32)
    for at in tl.range(start, end, BLOCK, num_stages=STAGES):
        place = at + tl.arange(0, BLOCK)
        value = tl.load(values + place, mask=place < end, other=0.0).to(tl.float32)
        lanes += value * value
    tl.store(sums + tl.program_id(0), tl.sum(lanes, axis=0))


def sums_of_squares(table: Table, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """See `one_pass_norm.Kernel`."""
    sums = torch.empty(table.chunks, dtype=torch.float32, device=table.addresses.device)
    if table.chunks:
        _sums_of_squares[(table.chunks,)](
            table.addresses, table.tensor_of, table.first_of, table.addresses.shape[1], sums,
            TYPES[tensors[0].dtype], table.aligned, table.chunk, BLOCK, STAGES, num_warps=WARPS,
        )  # fmt: skip
    return sums
