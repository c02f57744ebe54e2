"""`python -m megatron_fsdp_adapter inspect`: lists the contents of a checkpoint.

    inspect checkpoints/                      format, the run that saved it, sizes by part
    inspect checkpoints/ --keys               and each weight with shape, dtype, bytes, chunks, and
                                              its optimizer state; then all other keys
    inspect checkpoints/iter_0001000 --json
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_fsdp_adapter.checkpoint.inspection import (
    OPTIMIZER,
    WEIGHTS,
    Description,
    Entry,
    describe,
)
from megatron_fsdp_adapter.checkpoint.names import (
    HALVES,
    OPTIMIZER_META,
    OPTIMIZER_STATE,
    split_depth,
)

from .progress import size_text


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m megatron_fsdp_adapter inspect", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("path", type=Path, help="root of checkpoints, or one iter_* folder")
    add("--iteration", type=int, help="iteration of a root; default: the newest")
    add("--keys", action="store_true", help="list weights and other keys; --json lists every key")
    add("--match", default="", metavar="TEXT", help="with --keys: only lines of which a key "
        "contains TEXT")  # fmt: skip
    add("--json", action="store_true", help="print everything as JSON")
    return parser


def _row(entry: Entry, state: Sequence[tuple[str, Entry]]) -> str:
    shape = "object" if entry.shape is None else "x".join(map(str, entry.shape)) or "scalar"
    pieces = f"{entry.pieces} chunks" if entry.pieces != 1 else ""
    row = f"  {entry.key:<76} {shape:<18} {entry.dtype or '':<9} {size_text(entry.nbytes):>10}"
    return f"{row}  {pieces:<10}  {_state_text(state)}".rstrip()


def _state_text(state: Sequence[tuple[str, Entry]]) -> str:
    """The optimizer state of a weight: its tensors by name, and the number of options."""
    tensors = {kind: entry for kind, entry in state if entry.shape is not None}
    options = len(state) - len(tensors)
    nbytes = size_text(sum(entry.nbytes for entry in tensors.values()))
    parts = [f"{', '.join(sorted(tensors))}: {nbytes}"] if tensors else []
    return "; ".join(parts + ([f"{options} options"] if options else []))


def lines_of_keys(entries: Sequence[Entry]) -> list[tuple[Entry, list[tuple[str, Entry]]]]:
    """Each weight with its optimizer state, by kind, and each other key with an empty list."""
    weights = {_bare(one.key): one for one in entries if one.part == WEIGHTS}
    state: dict[str, list[tuple[str, Entry]]] = {one.key: [] for one in entries}
    for entry in (one for one in entries if one.part == OPTIMIZER):
        name = _bare(entry.key)
        front, _, last = name.rpartition(".")  # fsdp_dtensor: the kind is last
        first, _, back = name.partition(".")  # torch_dist: the kind is first
        # Options of a parameter that is saved in halves are stored for the whole parameter.
        for kind, owner in ((last, front), (first, _bare(back)), (last, front + HALVES[0])):
            if owner in weights:
                state[weights[owner].key].append((kind, entry))
                state.pop(entry.key, None)
                break
    return [(one, state[one.key]) for one in entries if one.key in state]


def _bare(key: str) -> str:
    """A key without the prefixes of a weight's name."""
    for prefix in ("model.", f"{OPTIMIZER_STATE}.", f"{OPTIMIZER_META}."):
        key = key.removeprefix(prefix)
    return split_depth(key)[1]


def render(found: Description, keys: bool, match: str = "") -> str:
    """The description as text; `keys` adds the lines of which a key contains `match`."""
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
        for entry, state in lines_of_keys(found.entries):
            if any(match in one.key for one in (entry, *(one for _, one in state))):
                yield _row(entry, state)


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
