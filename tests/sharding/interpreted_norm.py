"""Prints how far sums of squares of the kernel, run by Triton's interpreter, are from those in
float64, one line a case. A program of its own, as the interpreter has to be chosen before Triton is
imported."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import torch

from megatron_fsdp_adapter.sharding import triton_norm
from megatron_fsdp_adapter.sharding.one_pass_norm import CHUNK, OnePassSquares

CASES = ((5,), (CHUNK,), (CHUNK - 1, 7, 0, 2 * CHUNK + 3), (CHUNK, 0), (8, 64, CHUNK + 8), (0, 0))


def main() -> None:
    torch.manual_seed(0)
    squares = OnePassSquares(lambda device: triton_norm.sums_of_squares)
    for dtype in (torch.float32, torch.bfloat16):
        for sizes in CASES:
            for skip in (0, 1):
                tensors = [torch.randn(size + skip).to(dtype)[skip:] for size in sizes]
                expected = sum(tensor.double().square().sum() for tensor in tensors)
                found = squares(tensors)
                error = float(abs(found - expected)) / max(float(expected), 1e-30)
                print(f"{dtype} {sizes} from {skip}: {error < 1e-6}")
    for wrong in (float("inf"), float("nan")):
        tensors = [torch.ones(CHUNK + 3), torch.ones(3)]
        tensors[0][-1] = wrong
        print(f"{wrong}: {repr(squares(tensors).item()) == repr(wrong)}")


if __name__ == "__main__":
    main()
