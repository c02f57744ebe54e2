"""Checks that a checkpoint is undamaged.

Reads every byte and compares it with the recorded digests. Needs no process group, no GPU and no
Megatron, and executes no code that the checkpoint names. Digests find damage, not forgery.

    verify checkpoints                  the newest checkpoint of a root
    verify checkpoints --iteration 100  another one
    verify checkpoints/iter_0000100     the folder itself

Exit status: 0 if it is undamaged, 1 if it is damaged, 2 if it cannot be checked.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from megatron_fsdp_adapter.checkpoint import digests, folders

from .output import Report, answer
from .parser import base_parser

_SHOWN = 20


def examine(folder: Path, jobs: int = 1, progress: digests.Progress = digests.silent) -> Report:
    """Checks a folder; returns the report as plain values. jobs: files that are read at once.

    Raises ValueError if the folder has no digests, or damaged ones.
    """
    recorded = digests.read_digests(folder)
    if recorded is None:
        raise ValueError(
            f"{folder} has no {digests.DIGESTS}: another program or an older release wrote it, so "
            "it cannot be verified"
        )
    found = digests.check_folder(folder, recorded, progress, jobs)
    covered = {*recorded, digests.DIGESTS}
    return {
        "folder": str(folder),
        "files": len(recorded),
        "bytes": sum(size for size, _ in recorded.values()),
        "algorithm": digests.ALGORITHM,
        "intact": not found,
        "problems": found,
        "without_digest": sorted(p.name for p in folder.iterdir() if p.name not in covered),
    }


def render(report: Report) -> str:
    """The report as text."""
    size = f"{report['files']} files, {report['bytes'] / 2**30:.3f} GiB"
    lines = [f"{report['folder']}: {size}"]
    problems = report["problems"]
    lines += [f"  {problem}" for problem in problems[:_SHOWN]]
    hidden = len(problems) - _SHOWN
    if hidden > 0:
        lines.append(f"  and {hidden} more (--json has them all)")
    added = report["without_digest"]
    if added:
        lines.append(f"  not checked, added after the save: {', '.join(added)}")
    lines.append("verify: intact" if report["intact"] else "verify: DAMAGED (above)")
    return "\n".join(lines)


def make_parser() -> argparse.ArgumentParser:
    """The parser of `verify`."""
    parser = base_parser("verify", __doc__)
    parser.add_argument("folder", type=Path, help="checkpoint root, or one checkpoint's folder")
    parser.add_argument(
        "--iteration", type=int, metavar="N", help="iteration of a root; default: the newest"
    )
    return parser


def main(argv: Sequence[str]) -> int:
    """Prints the report. Returns 0, 1 if the checkpoint is damaged, 2 if it cannot be checked."""
    given = make_parser().parse_args(argv)

    def report(progress: digests.Progress) -> Report:
        folder = given.folder
        if not folders.is_plain(folder):
            folder = folders.find_folder(*folders.locate(folder, given.iteration))
        return examine(folder, min(8, os.cpu_count() or 1), progress)

    found = answer(given, "verify", report, render)
    if found is None:
        return 2
    return 0 if found["intact"] else 1
