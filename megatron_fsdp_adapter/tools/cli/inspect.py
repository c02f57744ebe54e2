"""Lists the contents of a checkpoint.

    inspect checkpoints/                      format, the run that saved it, sizes by part
    inspect checkpoints/ --keys               and each key with shape, dtype, bytes and chunks
    inspect checkpoints/iter_0001000 --json

Exit status: 0 if it is read, 2 if it cannot be.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_fsdp_adapter.checkpoint.digests import Progress
from megatron_fsdp_adapter.tools.inspection import OPTIMIZER, describe

from .output import Report, answer, size_text
from .parser import base_parser


def make_parser() -> argparse.ArgumentParser:
    """The parser of `inspect`."""
    parser = base_parser("inspect", __doc__)
    add = parser.add_argument
    add("path", type=Path, help="root of checkpoints, one iter_* folder, or a plain folder of DCP")
    add("--iteration", type=int, metavar="N", help="iteration of a root; default: the newest")
    add(
        "--keys",
        action="store_true",
        help="list keys; with --json also options of parameter groups",
    )
    add(
        "--match",
        default="",
        metavar="TEXT",
        help="with --keys: only keys that contain TEXT; default: all",
    )
    return parser


def _row(entry: dict[str, Any]) -> str:
    """The line of a key."""
    shape = entry["shape"]
    size = size_text(entry["nbytes"])
    form = "object"
    if shape is not None:
        form = "x".join(map(str, shape)) or "scalar"
    pieces = ""
    if entry["pieces"] != 1:
        pieces = f"{entry['pieces']} chunks"
    return (
        f"  {entry['key']:<90} {form:<18} {entry['dtype'] or '':<9} {size:>10}  {pieces}".rstrip()
    )


def _lines(found: Report, keys: bool, match: str) -> Iterator[str]:
    """The lines of the report. keys: True lists keys, but only those that contain `match`."""
    iteration = ""
    if found["iteration"] is not None:
        iteration = f", iteration {found['iteration']}"
    yield f"{found['folder']}: {found['format']}{iteration}"
    for title, values in (("saved by", found["saved_by"]), ("model", found["model"])):
        if values:
            yield title
        for name, value in values.items():
            yield f"  {name:<40} {value}"
    yield "holds"
    for part, row in found["totals"].items():
        size = size_text(row["bytes"])
        yield f"  {part:<12} {row['keys']:>7} keys {row['elements']:>15,} elements {size:>10}"
    if not keys:
        return
    yield "keys"
    for entry in found["entries"]:
        # Options of parameter groups are not listed: objects, of which each weight has several.
        is_option = entry["part"] == OPTIMIZER and entry["shape"] is None
        if match in entry["key"] and not is_option:
            yield _row(entry)


def main(argv: Sequence[str]) -> int:
    """Prints the contents of a checkpoint. Returns 0, or 2 if it cannot be read."""
    given = make_parser().parse_args(argv)

    def described(progress: Progress) -> Report:
        return describe(given.path, given.iteration)

    def render(found: Report) -> str:
        return "\n".join(_lines(found, given.keys, given.match))

    found = answer(given, "inspect", described, render)
    return 2 if found is None else 0
