"""Prints how far symmetric products of the kernel, run by Triton's interpreter, are from exact
ones, one line a case. A program of its own, as the interpreter has to be chosen before Triton is
imported."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import torch

from megatron_fsdp_adapter.optim.muon import triton_symmetric as kernels

CASES = ((1, 16, 32, False), (2, 80, 40, False), (3, 72, 88, False), (2, 48, 96, True),
         (2, 96, 32, False), (1, 16, 16, True))  # fmt: skip
SIDE = 16


def main() -> None:
    for depth in (16, 32):
        for batch, n, k, tall in CASES:
            if tall and k % depth:
                continue
            torch.manual_seed(n)
            x = torch.randn(batch, *((k, n) if tall else (n, k))).half()
            gram = (x.mT if tall else x).double()
            gram = gram @ gram.mT
            added = gram.half()
            plain = kernels.symmetric_product(x, x, None, 0.0, 1.0, 0.0, tall, SIDE, depth)
            found = kernels.symmetric_product(x, x, added, 0.5, -0.25, 3.0, tall, SIDE, depth)
            expected = 0.5 * added.double() - 0.25 * gram + 3.0 * torch.eye(n).double()
            worst = max(
                float((plain - gram).abs().max() / gram.abs().max()),
                float((found - expected).abs().max() / expected.abs().max()),
            )
            same = all(torch.equal(each, each.mT) for each in (plain, found))
            print(f"{depth} {(batch, n, k, tall)}: {worst < 2**-10} {same}", flush=True)
    for n in (1, SIDE, 5 * SIDE + 1, 40 * SIDE, 40 * SIDE + 1):
        covered = [(i, j) for i in range(-(-n // SIDE)) for j in range(i + 1)]
        print(f"tiles of {n}: {kernels.tiles_of(n, SIDE) == len(covered)} True", flush=True)


if __name__ == "__main__":
    main()
