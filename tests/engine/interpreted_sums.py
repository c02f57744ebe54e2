"""Prints in how many elements the kernel that sums rows, run by Triton's interpreter, gives other
bits for bf16 rows than for their casts to float32, and than additions one by one in the order of
the rows, one line a case. A program of its own, as the interpreter has to be chosen before Triton
is imported."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

from unittest import mock

import torch
from triton.runtime import interpreter

from megatron_fsdp_adapter.comm import triton_sums
from tests.quantized.interpreted import convert


def in_order(rows: torch.Tensor, before: torch.Tensor, accumulate: bool) -> torch.Tensor:
    """With a scale of a half, whose product is exact."""
    total = rows[0].float()
    for row in rows[1:]:
        total = total + row.float()
    total = total * 0.5
    return total + before if accumulate else total


def main() -> None:
    with mock.patch.object(interpreter, "_convert_float", convert):
        for count, numel in ((1, 5), (2, 2048), (3, 2049), (4, 4100)):
            rows = torch.randn(count, numel).bfloat16()
            before = torch.randn(numel)
            differ = 0
            for accumulate in (False, True):
                expected = in_order(rows, before, accumulate)
                for sent in (rows, rows.float()):
                    output = before.clone()
                    triton_sums.sum_rows(sent, output, 0.5, accumulate)
                    differ += int((output != expected).sum())
            print(f"{count} rows of {numel}: {differ} differ")


if __name__ == "__main__":
    main()
