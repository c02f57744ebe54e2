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

from megatron_fsdp_adapter.tools.inspection import OPTIMIZER, describe

from .output import answer, base_parser, size_text


def make_parser() -> argparse.ArgumentParser:
    """The parser of `inspect`."""
    parser = base_parser("inspect", __doc__)
    add = parser.add_argument
    add("path", type=Path, help="root of checkpoints, or one iter_* folder")
    add("--iteration", type=int, metavar="N", help="iteration of a root; default: the newest")
    add("--keys", action="store_true", help="list keys; with --json also options of parameter "
        "groups")  # fmt: skip
    add("--match", default="", metavar="TEXT",
        help="with --keys: only keys that contain TEXT; default: all")  # fmt: skip
    return parser


def _row(entry: dict[str, Any]) -> str:
    shape, size = entry["shape"], size_text(entry["nbytes"])
    of = "object" if shape is None else "x".join(map(str, shape)) or "scalar"
    pieces = f"{entry['pieces']} chunks" if entry["pieces"] != 1 else ""
    return f"  {entry['key']:<90} {of:<18} {entry['dtype'] or '':<9} {size:>10}  {pieces}".rstrip()


def _lines(found: dict[str, Any], keys: bool, match: str) -> Iterator[str]:
    where = "" if found["iteration"] is None else f", iteration {found['iteration']}"
    yield f"{found['folder']}: {found['format']}{where}"
    for title, values in (("saved by", found["saved_by"]), ("model", found["model"])):
        if values:
            yield title
            yield from (f"  {name:<40} {value}" for name, value in values.items())
    yield "holds"
    for part, row in found["totals"].items():
        yield (
            f"  {part:<12} {row['keys']:>7} keys {row['elements']:>15,} elements "
            f"{size_text(row['bytes']):>10}"
        )
    if keys:
        yield "keys"
        # Options of parameter groups are objects, some of each weight.
        yield from (
            _row(entry) for entry in found["entries"]
            if match in entry["key"] and (entry["part"] != OPTIMIZER or entry["shape"] is not None)
        )


def main(argv: Sequence[str]) -> int:
    """Prints the contents of a checkpoint. Returns 0, or 2 if it cannot be read."""
    given = make_parser().parse_args(argv)
    found = answer(
        given, "inspect", lambda _: describe(given.path, given.iteration),
        lambda found: "\n".join(_lines(found, given.keys, given.match)),
    )  # fmt: skip
    return 2 if found is None else 0
