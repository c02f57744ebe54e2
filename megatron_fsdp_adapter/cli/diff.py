"""`python -m megatron_fsdp_adapter diff`: compares two checkpoints bit by bit.

    diff runs/a runs/b                            the newest of each
    diff runs/a/iter_0000100 runs/a/iter_0000200 --no-values
    diff runs/a converted/ --weights-only         two formats, compared by parameter

Exit status: 0 if they are equal, 1 if they differ, 2 if one cannot be read.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_fsdp_adapter.checkpoint.inspection import Difference, diff

from .progress import progress_lines

SHOWN = 20


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m megatron_fsdp_adapter diff", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("a", type=Path, help="root of checkpoints, or one iter_* folder")
    add("b", type=Path, help="the other one")
    add("--iterations", type=int, nargs=2, default=(None, None), metavar=("A", "B"),
        help="iterations of two roots; default: the newest")  # fmt: skip
    add("--weights-only", action="store_true", help="compare weights only")
    add("--no-values", dest="values", action="store_false",
        help="compare keys, shapes and dtypes only, without reading data")  # fmt: skip
    add("--block-mib", type=int, default=64, help="size of the blocks that are read at a time; "
        "default %(default)s")  # fmt: skip
    add("--all", action="store_true", help=f"list everything, not {SHOWN} of each kind")
    add("--json", action="store_true", help="print everything as JSON")
    add("--quiet", action="store_true", help="no lines of progress")
    return parser


def render(found: Difference, shown: int | None = SHOWN) -> str:
    """The difference as text, with at most `shown` lines of each kind, and the verdict."""
    lines = [*_lines(found, shown)]
    return "\n".join([*lines, "diff: they differ (above)" if lines else "diff: the same"])


def _lines(found: Difference, shown: int | None) -> Iterator[str]:
    values = [
        f"{d.key}: {d.differing} of {d.elements} elements, by at most {d.largest:.3g}"
        for d in found.values
    ]
    kinds: tuple[tuple[str, Sequence[str]], ...] = (
        ("only in A", found.only_a),
        ("only in B", found.only_b),
        ("of another shape", found.shapes),
        ("of another dtype", found.dtypes),
        ("with other values", values),
        ("objects with other values", found.objects),
    )
    for title, lines in kinds:
        if lines:
            yield f"{title} ({len(lines)})"
            yield from (f"  {line}" for line in lines[:shown])
            if shown is not None and len(lines) > shown:
                yield f"  ... {len(lines) - shown} more (--all)"


def main(argv: Sequence[str]) -> int:
    """Prints the differences of two checkpoints. Returns 0, 1 if they differ, 2 if one cannot be
    read."""
    given = _parser().parse_args(argv)
    try:
        found = diff(
            given.a, given.b, iterations=tuple(given.iterations), weights_only=given.weights_only,
            values=given.values, block_bytes=given.block_mib * 2**20,
            begin=progress_lines(given.quiet or not given.values),
        )  # fmt: skip
    except (ValueError, FileNotFoundError) as error:
        print(f"diff: {error}", file=sys.stderr)
        return 2
    if given.json:
        print(json.dumps({**dataclasses.asdict(found), "different": bool(found)}, indent=2))
    else:
        print(render(found, None if given.all else SHOWN))
    return int(bool(found))
