"""Compares two checkpoints bit by bit.

    diff runs/a runs/b                            the newest of each
    diff runs/a/iter_0000100 runs/a/iter_0000200 --no-values
    diff runs/a converted/ --weights-only         two formats, compared by parameter

Exit status: 0 if they are equal, 1 if they differ, 2 if one cannot be read.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_fsdp_adapter.checkpoint.digests import Progress
from megatron_fsdp_adapter.tools.inspection import diff

from .output import Report, answer
from .parser import base_parser

SHOWN = 20
"""Most lines of each kind."""
TITLES = {
    "only_a": "only in A",
    "only_b": "only in B",
    "shapes": "of another shape",
    "dtypes": "of another dtype",
    "values": "with other values",
    "objects": "objects with other values",
}


def make_parser() -> argparse.ArgumentParser:
    """The parser of `diff`."""
    parser = base_parser("diff", __doc__)
    add = parser.add_argument
    add("a", type=Path, help="root of checkpoints, one iter_* folder, or a plain folder of DCP")
    add("b", type=Path, help="the other one")
    add(
        "--iterations",
        type=int,
        nargs=2,
        default=(None, None),
        metavar=("A", "B"),
        help="iterations of two roots; default: the newest",
    )
    add("--weights-only", action="store_true", help="compare weights only")
    add(
        "--no-values",
        dest="values",
        action="store_false",
        help="compare keys, shapes and dtypes only, without reading data",
    )
    return parser


def render(found: Report) -> str:
    """The differences as text, at most `SHOWN` lines of each kind, and the verdict."""
    lines = list(_lines(found))
    lines.append("diff: they differ (above)" if lines else "diff: the same")
    return "\n".join(lines)


def _lines(found: Report) -> Iterator[str]:
    for kind, title in TITLES.items():
        entries = found[kind]
        if not entries:
            continue
        yield f"{title} ({len(entries)})"
        for entry in entries[:SHOWN]:
            yield f"  {_value_text(entry) if kind == 'values' else entry}"
        if len(entries) > SHOWN:
            yield f"  ... {len(entries) - SHOWN} more (--json has them all)"


def _value_text(row: dict[str, Any]) -> str:
    """The line of a tensor whose values differ."""
    return (
        f"{row['key']}: {row['differing']} of {row['elements']} elements, "
        f"by at most {row['largest']:.3g}"
    )


def main(argv: Sequence[str]) -> int:
    """Prints the differences of two checkpoints. Returns 0, 1 if they differ, 2 if one cannot be
    read."""
    given = make_parser().parse_args(argv)

    def differences(progress: Progress) -> Report:
        found = diff(
            given.a,
            given.b,
            iterations=tuple(given.iterations),
            weights_only=given.weights_only,
            values=given.values,
            progress=progress,
        )
        return {**found, "different": any(found.values())}

    found = answer(given, "diff", differences, render)
    if found is None:
        return 2
    return 1 if found["different"] else 0
