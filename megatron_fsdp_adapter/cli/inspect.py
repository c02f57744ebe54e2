"""`python -m megatron_fsdp_adapter inspect`: what is in a checkpoint.

    inspect checkpoints/                      format, who saved it, sizes by part
    inspect checkpoints/ --keys               and each weight with shape, dtype, bytes, chunks, and
                                              what the optimizer has of it; then all other keys
    inspect checkpoints/iter_0001000 --json
    inspect checkpoints/ --proof proof.json   whether that certificate speaks of this checkpoint

A certificate (`doctor --prove` writes one) in the checkpoint's folder or its root is shown too.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_fsdp_adapter.checkpoint.inspection import (
    OPTIMIZER,
    WEIGHTS,
    Description,
    Entry,
    describe,
)
from megatron_fsdp_adapter.checkpoint.names import HALVES, OPTIMIZER_META, OPTIMIZER_STATE
from megatron_fsdp_adapter.checkpoint.record import read_record
from megatron_fsdp_adapter.prove.proof import (
    Certificate,
    Match,
    find_certificate,
    match,
    read_certificate,
)

from .progress import size_text


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m megatron_fsdp_adapter inspect", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("path", type=Path, help="root of checkpoints, one iter_* folder, or safetensors folder")
    add("--iteration", type=int, help="which one of a root; default the newest")
    add("--keys", action="store_true", help="list weights and other keys; --json lists every key")
    add("--match", default="", metavar="TEXT", help="with --keys: only lines of which a key "
        "contains TEXT")  # fmt: skip
    add("--proof", type=Path, metavar="FILE",
        help="certificate to show; default proof.json in the checkpoint's folder or its root")
    add("--json", action="store_true", help="print everything as JSON")
    return parser


@dataclass(frozen=True)
class Shown:
    """A certificate, its file, and how it fits the checkpoint's record (None: there is none)."""

    path: Path
    certificate: Certificate
    match: Match | None

    def plain(self) -> dict[str, Any]:
        """What --json prints of it."""
        fits = None if self.match is None else {**vars(self.match), "fits": self.match.fits}
        content = json.loads(self.certificate.to_json())
        return {"path": str(self.path), **content, "match": fits}


def certificate_of(folder: Path, given: Path | None) -> Shown | None:
    """The certificate in the file `given`, or that of a checkpoint's folder; None if it has none.

    Raises FileNotFoundError or ValueError if the file is not there or is no certificate.
    """
    path = find_certificate(folder) if given is None else given
    if path is None:
        return None
    certificate, record = read_certificate(path), read_record(folder)
    return Shown(path, certificate, None if record is None else match(certificate, record))


def _row(entry: Entry, state: Sequence[tuple[str, Entry]]) -> str:
    shape = "object" if entry.shape is None else "x".join(map(str, entry.shape)) or "scalar"
    pieces = f"{entry.pieces} chunks" if entry.pieces != 1 else ""
    row = f"  {entry.key:<76} {shape:<18} {entry.dtype or '':<9} {size_text(entry.nbytes):>10}"
    return f"{row}  {pieces:<10}  {_state_text(state)}".rstrip()


def _state_text(state: Sequence[tuple[str, Entry]]) -> str:
    """What the optimizer has of a weight: its tensors by name, and how many options."""
    tensors = {kind: entry for kind, entry in state if entry.shape is not None}
    options = len(state) - len(tensors)
    nbytes = size_text(sum(entry.nbytes for entry in tensors.values()))
    parts = [f"{', '.join(sorted(tensors))}: {nbytes}"] if tensors else []
    return "; ".join(parts + ([f"{options} options"] if options else []))


def lines_of_keys(entries: Sequence[Entry]) -> list[tuple[Entry, list[tuple[str, Entry]]]]:
    """Each weight with what the optimizer has of it, by kind, and each other key with nothing."""
    weights = {_bare(one.key): one for one in entries if one.part == WEIGHTS}
    state: dict[str, list[tuple[str, Entry]]] = {one.key: [] for one in entries}
    for entry in (one for one in entries if one.part == OPTIMIZER):
        name = _bare(entry.key)
        front, _, last = name.rpartition(".")  # fsdp_dtensor: the kind is last
        first, _, back = name.partition(".")  # torch_dist: it is first
        # Options are told of the whole of a parameter that is saved in halves.
        for kind, owner in ((last, front), (first, _bare(back)), (last, front + HALVES[0])):
            if owner in weights:
                state[weights[owner].key].append((kind, entry))
                state.pop(entry.key, None)
                break
    return [(one, state[one.key]) for one in entries if one.key in state]


def _bare(key: str) -> str:
    """A key without what stands in front of a weight's name."""
    for prefix in ("model.", f"{OPTIMIZER_STATE}.", f"{OPTIMIZER_META}."):
        key = key.removeprefix(prefix)
    while key.startswith("module."):
        key = key.removeprefix("module.")
    return key


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


def render_certificate(shown: Shown) -> str:
    """The certificate as text, with what of it differs from the checkpoint."""
    return "\n".join(_certificate_lines(shown))


def _certificate_lines(shown: Shown) -> Iterator[str]:
    certificate = shown.certificate
    yield "certificate"
    verdict = "holds" if certificate.holds else "DOES NOT HOLD"
    yield f"  {shown.path}: {verdict}, proven at {certificate.proven_at}"
    for one in certificate.comparisons:
        sign = "" if one.holds else "  DOES NOT HOLD"
        yield f"  {one.what:<40} {one.result:.3g}, at most {one.bound:.3g}{sign}"
    yield f"  options digest {certificate.options_digest}"
    found = shown.match
    if found is None:
        yield "  the checkpoint has no record, so its options and versions are unknown"
        return
    yield from _match_lines("options", (*found.options, *found.unknown), len(found.compared))
    yield from _match_lines("versions", found.versions, len(certificate.versions))


def _match_lines(what: str, differences: Sequence[str], compared: int) -> Iterator[str]:
    if not differences:
        verdict = f"those of the checkpoint ({compared} compared)" if compared else "not known"
        yield f"  {what}: {verdict}"
        return
    yield f"  {what}: NOT those of the checkpoint"
    yield from (f"    {line}" for line in differences)


def main(argv: Sequence[str]) -> int:
    """Prints what is in a checkpoint. Returns 0, or 2 if there is none that can be read."""
    given = _parser().parse_args(argv)
    try:
        found = describe(given.path, given.iteration)
        shown = certificate_of(Path(found.folder), given.proof)
    except (ValueError, FileNotFoundError) as error:
        print(f"inspect: {error}", file=sys.stderr)
        return 2
    if given.json:
        plain = {**dataclasses.asdict(found), "totals": found.totals()}
        plain["certificate"] = None if shown is None else shown.plain()
        print(json.dumps(plain, indent=2, default=str))
    else:
        print(render(found, given.keys, given.match))
        if shown is not None:
            print(render_certificate(shown))
    return 0
