"""`python -m megatron_fsdp_adapter inspect`: lists the contents of a checkpoint.

    inspect checkpoints/                      format, the run that saved it, sizes by part
    inspect checkpoints/ --keys               and each key with shape, dtype, bytes and chunks
    inspect checkpoints/iter_0001000 --json
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_fsdp_adapter.checkpoint.inspection import OPTIMIZER, Description, Entry, describe

from .progress import size_text


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m megatron_fsdp_adapter inspect", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("path", type=Path, help="root of checkpoints, or one iter_* folder")
    add("--iteration", type=int, help="iteration of a root; default: the newest")
    add("--keys", action="store_true", help="list keys; with --json options of parameter groups "
        "too")  # fmt: skip
    add("--match", default="", metavar="TEXT", help="with --keys: only those that contain TEXT")
    add("--json", action="store_true", help="print everything as JSON")
    return parser


def _row(entry: Entry) -> str:
    shape = "object" if entry.shape is None else "x".join(map(str, entry.shape)) or "scalar"
    pieces = f"{entry.pieces} chunks" if entry.pieces != 1 else ""
    size = size_text(entry.nbytes)
    return f"  {entry.key:<90} {shape:<18} {entry.dtype or '':<9} {size:>10}  {pieces}".rstrip()


def render(found: Description, keys: bool, match: str = "") -> str:
    """The description as text; `keys` adds the keys that contain `match`."""
    return "\n".join(_lines(found, keys, match))


def _lines(found: Description, keys: bool, match: str) -> Iterator[str]:
    where = "" if found.iteration is None else f", iteration {found.iteration}"
    yield f"{found.folder}: {found.format}{where}"
    for title, values in (("saved by", found.saved_by), ("model", found.model)):
        if values:
            yield title
            yield from (f"  {name:<40} {value}" for name, value in values.items())
    yield "holds"
    for part, row in found.totals().items():
        yield (
            f"  {part:<12} {row['keys']:>7} keys {row['elements']:>15,} elements "
            f"{size_text(row['bytes']):>10}"
        )
    if keys:
        yield "keys"
        # Options of parameter groups are objects, some of each weight.
        listed = (one for one in found.entries if one.part != OPTIMIZER or one.shape is not None)
        yield from (_row(entry) for entry in listed if match in entry.key)


def main(argv: Sequence[str]) -> int:
    """Prints the contents of a checkpoint. Returns 0, or 2 if it cannot be read."""
    given = _parser().parse_args(argv)
    try:
        found = describe(given.path, given.iteration)
    except (ValueError, FileNotFoundError) as error:
        print(f"inspect: {error}", file=sys.stderr)
        return 2
    if given.json:
        plain = {**dataclasses.asdict(found), "totals": found.totals()}
        print(json.dumps(plain, indent=2, default=str))
    else:
        print(render(found, given.keys, given.match))
    return 0
