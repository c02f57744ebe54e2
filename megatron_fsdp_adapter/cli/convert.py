"""`python -m megatron_fsdp_adapter convert`: converts a checkpoint to another format.

    convert checkpoints/ converted/ --to torch_dist             Megatron's own DDP resumes from it
    convert converted/ back/ --to fsdp_dtensor                  and this wrapper from that
    convert checkpoints/ llama/ --to huggingface --dtype bfloat16 --vocab-size 128256
    convert llama/ imported/ --to fsdp_dtensor                  weights, to train on from

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
MIB, GB = 2**20, 1000**3


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m megatron_fsdp_adapter convert", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("source", type=Path, help="root of checkpoints, one iter_* folder, or safetensors folder")
    add("target", type=Path, help="a new folder")
    add("--to", required=True, choices=FORMATS, help="format of the result")
    add("--from", dest="source_format", choices=FORMATS, help="of the source; default: detected")
    add("--iteration", type=int, help="which one of a root; default the newest")
    add("--weights-only", action="store_true", help="leave out optimizer, scheduler and RNG")
    add("--transformer-impl", choices=TRANSFORMER_IMPLS, help="layers of the Megatron model")
    add("--experts", choices=EXPERT_LAYOUTS, help="experts of the Megatron model: one module "
        "each, or TEGroupedMLP (--moe-grouped-gemm)")  # fmt: skip
    add("--swiglu", action=argparse.BooleanOptionalAction, help="whether its MLPs are gated")
    add("--dtype", choices=DTYPES, help=(
        "compute dtype of the model, or stored dtype of Hugging Face weights; default: that of "
        "the source"
    ))  # fmt: skip
    add("--hf-config", type=Path, help=(
        "config.json of the Hugging Face model, if the checkpoint lacks the model's arguments"
    ))  # fmt: skip
    add("--vocab-size", type=int, help=(
        "embedding rows of the Hugging Face model; default: all, with padding"
    ))  # fmt: skip
    add("--padded-vocab-size", type=int, help=(
        "embedding rows of a Megatron model converted from a Hugging Face one; default: the next "
        "multiple of --make-vocab-size-divisible-by"
    ))  # fmt: skip
    add("--make-vocab-size-divisible-by", type=int, default=128, help="default %(default)s")
    add("--block-mib", type=int, default=64, help="size of the blocks that are read, converted and "
        "written at a time; default %(default)s")  # fmt: skip
    add("--max-file-gb", type=int, default=5, help="of a safetensors file; default %(default)s")
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
        hf_config=given.hf_config,
        vocab_size=given.vocab_size,
        padded_vocab_size=given.padded_vocab_size,
        make_vocab_size_divisible_by=given.make_vocab_size_divisible_by,
        block_bytes=given.block_mib * MIB,
        max_file_bytes=given.max_file_gb * GB,
    )


def render(report: Report) -> str:
    """The report as text."""
    lines = [
        f"{report.source_format} -> {report.target_format}: {report.folder}",
        f"iteration {report.iteration}, {report.tensors} tensors, {size_text(report.nbytes)}",
        f"tensors in memory at most: {size_text(report.memory_bound)}",
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
