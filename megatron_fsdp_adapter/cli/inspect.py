"""`python -m megatron_fsdp_adapter inspect`: what is in a checkpoint.

    inspect checkpoints/                      format, who saved it, sizes by part
    inspect checkpoints/ --keys               and every key with shape, dtype, bytes, chunks
    inspect checkpoints/iter_0001000 --json
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_fsdp_adapter.checkpoint.inspection import Description, Entry, describe

from .progress import size_text


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m megatron_fsdp_adapter inspect", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("path", type=Path, help="root of checkpoints, one iter_* folder, or safetensors folder")
    add("--iteration", type=int, help="which one of a root; default the newest")
    add("--keys", action="store_true", help="list every key")
    add("--match", default="", metavar="TEXT", help="with --keys: only keys that contain TEXT")
    add("--json", action="store_true", help="print everything as JSON")
    return parser


def _row(entry: Entry) -> str:
    shape = "object" if entry.shape is None else "x".join(map(str, entry.shape)) or "scalar"
    pieces = f"{entry.pieces} chunks" if entry.pieces != 1 else ""
    row = f"  {entry.key:<76} {shape:<18} {entry.dtype or '':<9} {size_text(entry.nbytes):>10}"
    return f"{row}  {pieces}".rstrip()


def render(found: Description, keys: bool, match: str = "") -> str:
    """The description as text; `keys` adds a line for each key that contains `match`."""
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
        yield from (_row(entry) for entry in found.entries if match in entry.key)


def main(argv: Sequence[str]) -> int:
    """Prints what is in a checkpoint. Returns 0, or 2 if there is none that can be read."""
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
