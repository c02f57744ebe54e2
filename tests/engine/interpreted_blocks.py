"""Prints in how many bytes and sums the kernels of `blocks`, run by Triton's interpreter, differ
from torch on the host, one line a case. A program of its own, as the interpreter has to be chosen
before Triton is imported."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

from unittest import mock

import numpy as np
import torch
from triton.runtime import interpreter

from megatron_fsdp_adapter.core.runtime import blocks, triton_blocks
from megatron_fsdp_adapter.core.runtime.block_format import row_bytes
from tests.quantised.interpreted import convert

NASTY = (float("nan"), float("inf"), 0.0, 1e-38, 3e38, -448.0, 2.0**-149)


def main() -> None:
    with mock.patch.object(interpreter, "_convert_float", convert), np.errstate(all="ignore"):
        for seed, (count, numel) in enumerate([(1, 1), (2, 31), (2, 96), (3, 2049), (4, 4100)]):
            generator = torch.Generator().manual_seed(seed)
            spread = torch.randint(-40, 40, (count, numel), generator=generator)
            source = torch.ldexp(torch.randn(count, numel, generator=generator), spread)
            source.view(-1)[:: max(1, numel // 7)] = NASTY[seed % len(NASTY)]
            source = source.bfloat16() if seed % 2 else source
            width = row_bytes(numel)
            rows = torch.zeros(2, count, width, dtype=torch.uint8)
            blocks.encode_by_torch(source, rows[0])
            triton_blocks.encode(source, rows[1])
            differ = int((rows[0] != rows[1]).sum())
            output = torch.randn(numel, generator=generator).repeat(2, 1)
            for accumulate in (False, True):
                blocks.sum_by_torch(rows[0], output[0], 1 / 3, accumulate)
                triton_blocks.sum_encoded(rows[0], output[1], 1 / 3, accumulate)
                differ += int((output[0].view(torch.int32) != output[1].view(torch.int32)).sum())
            print(f"{count} x {numel}: {differ} differ", flush=True)


if __name__ == "__main__":
    main()
