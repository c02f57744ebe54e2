"""Runs the published point of Megatron-FSDP beside its peers: Llama-3 8B, FP8, on eight GPUs.

    python scripts/record.py --out runs/record

Megatron-Bridge 25.11 reports for 8 x H100: 32 layers, FSDP over 8 ranks, FP8 tensorwise with FP8
weights, sequence 8192, micro batch 1, global batch 128, 14,451 tokens/s and 744 TFLOP/s a GPU.

Rows: this package with stock options, with `fsdp_unsharded_budget_gib=auto`, and with that and
captured layers; Megatron's DDP that recomputes 5 layers; Megatron-FSDP; and the floor, forward and
backward of a GPU alone. They have separate processes, one after the other, on one machine. A call
with the same --out continues with the rows that it lacks.

On fewer GPUs the model has fewer layers, and a step fewer microbatches: `SCALED`. TFLOP/s count, as
Bridge does, 6 FLOPs for each weight of a GEMM and half of the score matrix, not what is recomputed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import benchmark
import torch

ROOT = Path(__file__).resolve().parents[1]

PUBLISHED = "14,451 tokens/s and 744 TFLOP/s a GPU (Megatron-Bridge 25.11, 8 x H100)"
PRECISION = "fp8w_tensorwise"
ROWS = (
    f"floor@{PRECISION}",
    f"ours-layers:optim_grads_params+auto@{PRECISION}",
    f"ours:optim_grads_params+auto@{PRECISION}",
    f"ours:optim_grads_params@{PRECISION}",
    f"ddp-recompute@{PRECISION}",
    f"bundled:optim_grads_params@{PRECISION}",
)


@dataclass(frozen=True)
class Shape:
    """Layers of the model, and microbatches of a step on each rank."""

    layers: int
    microbatches: int


WHOLE = Shape(32, 16)
SCALED = {8: WHOLE, 4: Shape(32, 8), 2: Shape(24, 8), 1: Shape(14, 8)}
"""The shape by the number of GPUs: what DDP and Megatron-FSDP have room for on GPUs of 140 GB."""


def shape_of(ranks: int) -> Shape:
    """The shape on so many GPUs: that of the nearest smaller number in `SCALED`."""
    return SCALED[max(count for count in SCALED if count <= ranks)]


def words_of(given: argparse.Namespace) -> list[str]:
    """The command line of `benchmark.py`."""
    return [
        f"--ranks={given.ranks}",
        f"--out={given.out}",
        f"--preset={ROOT / 'configs' / 'llama3-8b.yaml'}",
        f"--num-layers={given.layers}",
        f"--num-microbatches={given.microbatches}",
        "--seq-length=8192",
        "--max-position-embeddings=8192",
        "--gradient-accumulation-fusion",
        f"--wrappers={given.wrappers}",
        f"--warmup={given.warmup}",
        f"--steps={given.steps}",
        f"--repeats={given.repeats}",
        f"--row-limit={given.row_limit}",
        f"--time-limit={given.time_limit}",
    ]


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--ranks", type=int, help="processes, one per GPU; default: the machine's GPUs, at most 8")
    add("--layers", type=int, help="of the model; default: 32, or fewer on fewer GPUs")
    add("--microbatches", type=int, help="of a step on each rank; default: 16, or fewer")
    add("--wrappers", default=",".join(ROWS), help="rows, as of benchmark.py")
    add("--warmup", type=int, default=8, help="steps before the first block")
    add("--steps", type=int, default=2, help="steps of a block")
    add("--repeats", type=int, default=6, help="blocks of a row")
    add("--row-limit", type=float, default=240.0, help="seconds of a row")
    add("--time-limit", type=float, default=3600.0, help="seconds of all rows")
    add("--out", type=Path, default=Path("runs/record"), help="folder for numbers and logs")
    given = parser.parse_args(list(arguments))
    if given.ranks is None:
        given.ranks = min(torch.cuda.device_count(), 8)
    if given.ranks < 1:
        parser.error("--ranks 0: there is no GPU. Use a machine with one GPU or more")
    shape = shape_of(given.ranks)
    given.layers = given.layers or shape.layers
    given.microbatches = given.microbatches or shape.microbatches
    return given


def heading(given: argparse.Namespace) -> str:
    """Lines that say what is measured, and in what it differs from the published point."""
    lines = [f"Published: {PUBLISHED}"]
    if torch.cuda.is_available():
        lines.append(f"Here: {given.ranks} x {torch.cuda.get_device_name()}")
    if (given.layers, given.microbatches, given.ranks) != (WHOLE.layers, WHOLE.microbatches, 8):
        lines.append(
            f"Scaled: {given.layers} of {WHOLE.layers} layers, {given.microbatches} of "
            f"{WHOLE.microbatches} microbatches, {given.ranks} of 8 ranks. Compare with the floor "
            "of this machine, not with the published point"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints. Returns the status of `benchmark.py`."""
    given = parsed(sys.argv[1:] if arguments is None else arguments)
    print(heading(given), flush=True)
    return benchmark.main(words_of(given))


if __name__ == "__main__":
    sys.exit(main())
