"""Converts a checkpoint to another format.

    convert checkpoints/ converted/ --to torch_dist             Megatron's own DDP resumes from it
    convert converted/ back/ --to fsdp_dtensor                  and this wrapper from that

One process, no GPU, no launcher. The format of the source is detected.

Exit status: 0 if it is converted, 2 if it cannot be.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path

from megatron_fsdp_adapter.checkpoint.convert import FORMATS, convert
from megatron_fsdp_adapter.checkpoint.digests import Progress

from .output import Report, answer, size_text
from .parser import base_parser


def make_parser() -> argparse.ArgumentParser:
    """The parser of `convert`."""
    parser = base_parser("convert", __doc__)
    add = parser.add_argument
    formats = " or ".join(FORMATS)
    add("source", type=Path, help="root of checkpoints, or one iter_* folder")
    add("target", type=Path, help="a new folder")
    add("--to", required=True, metavar="FORMAT", help=f"{formats}: format of the result")
    add("--iteration", type=int, metavar="N", help="iteration of a root; default: the newest")
    add("--weights-only", action="store_true", help="leave out optimizer, scheduler and RNG")
    return parser


def render(report: Report) -> str:
    """The report as text."""
    size = size_text(report["nbytes"])
    lines = [
        f"{report['source_format']} -> {report['target_format']}: {report['folder']}",
        f"iteration {report['iteration']}, {report['tensors']} tensors, {size}",
    ]
    dropped = _by_subject(report["dropped"])
    if dropped:
        more = f" and {len(dropped) - 8} more" if len(dropped) > 8 else ""
        lines.append(f"not converted: {', '.join(dropped[:8])}{more}")
    return "\n".join(lines)


def _by_subject(keys: Iterable[str]) -> list[str]:
    """The keys, with one text in place of those of optimizer state, of which there are many."""
    found = []
    of_optimizer = 0
    for key in keys:
        if key.startswith("optimizer."):
            of_optimizer += 1
        else:
            found.append(key)
    if of_optimizer:
        found.append(f"optimizer state ({of_optimizer} entries)")
    return found


def main(argv: Sequence[str]) -> int:
    """Converts and prints a report. Returns 0, or 2 if the input cannot be converted."""
    given = make_parser().parse_args(argv)

    def converted(progress: Progress) -> Report:
        return convert(
            given.source,
            given.target,
            given.to,
            iteration=given.iteration,
            weights_only=given.weights_only,
            progress=progress,
        )

    return 2 if answer(given, "convert", converted, render) is None else 0
