"""`python -m megatron_fsdp_adapter convert`: converts a checkpoint to another format.

    convert checkpoints/ converted/ --to torch_dist             Megatron's own DDP resumes from it
    convert converted/ back/ --to fsdp_dtensor                  and this wrapper from that

One process, no GPU, no launcher. The format of the source is detected.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from megatron_fsdp_adapter.checkpoint.convert import FORMATS, Options, Report, convert
from megatron_fsdp_adapter.checkpoint.convert.training_state import (
    EXPERT_LAYOUTS,
    TRANSFORMER_IMPLS,
)

from .progress import progress_lines, size_text

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MIB = 2**20


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m megatron_fsdp_adapter convert", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    formats = " or ".join(FORMATS)
    add("source", type=Path, help="root of checkpoints, or one iter_* folder")
    add("target", type=Path, help="a new folder")
    add("--to", required=True, metavar="FORMAT", help=f"{formats}: format of the result")
    add("--from", dest="source_format", metavar="FORMAT", help="of the source; default: detected")
    add("--iteration", type=int, help="which one of a root; default the newest")
    add("--weights-only", action="store_true", help="leave out optimizer, scheduler and RNG")
    add("--transformer-impl", choices=TRANSFORMER_IMPLS, help="layers of the model")
    add("--experts", choices=EXPERT_LAYOUTS, help="experts of the model: one module "
        "each, or TEGroupedMLP (--moe-grouped-gemm)")  # fmt: skip
    add("--swiglu", action=argparse.BooleanOptionalAction, help="whether its MLPs are gated")
    add("--dtype", choices=DTYPES, help="compute dtype of the model; default: the source's")
    add("--block-mib", type=int, default=64, help="size of the blocks that are read, converted and "
        "written at a time; default %(default)s")  # fmt: skip
    add("--json", action="store_true", help="print the report as JSON")
    add("--quiet", action="store_true", help="no lines of progress")
    return parser


def _options(given: argparse.Namespace) -> Options:
    return Options(
        weights_only=given.weights_only,
        transformer_impl=given.transformer_impl,
        experts=given.experts,
        swiglu=given.swiglu,
        params_dtype=DTYPES.get(given.dtype),
        block_bytes=given.block_mib * MIB,
    )


def render(report: Report) -> str:
    """The report as text."""
    lines = [
        f"{report.source_format} -> {report.target_format}: {report.folder}",
        f"iteration {report.iteration}, {report.tensors} tensors, {size_text(report.nbytes)}",
    ]
    if report.dropped:
        more = f" and {len(report.dropped) - 8} more" if len(report.dropped) > 8 else ""
        lines.append(f"not converted: {', '.join(report.dropped[:8])}{more}")
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    """Converts and prints a report. Returns 0, or 2 if the input cannot be converted."""
    given = _parser().parse_args(argv)
    try:
        report = convert(
            given.source, given.target, given.to, source_format=given.source_format,
            iteration=given.iteration, options=_options(given), begin=progress_lines(given.quiet),
        )  # fmt: skip
    except (ValueError, OSError) as error:
        print(f"convert: {error}", file=sys.stderr)
        return 2
    plain = {**dataclasses.asdict(report), "folder": str(report.folder)}
    print(json.dumps(plain, indent=2) if given.json else render(report))
    return 0
