"""Removes the machine code of all GPU architectures except one from a CUDA library. Zeros replace
it, so that the file compresses to a fraction.

    python scripts/prune_fatbins.py libnccl.so.2 pruned/libnccl.so.2 --arch 90

A fat binary is a container of entries, each for one architecture, with machine code or PTX. A
device runs machine code of its major version that is not newer than itself, and compiles PTX that
is not newer. The used entry moves to the front of its container, and the container ends after it.
Containers keep their place, and those without a usable entry are not changed.
"""

from __future__ import annotations

import argparse
import shutil
import struct
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

MAGIC = 0xBA55ED50
CONTAINER = struct.Struct("<IHHQ")
"""Magic, version (1), bytes of this header, bytes of all entries."""
SIZE, SIZE_AT = struct.Struct("<Q"), 8
"""Offset of the last of these fields."""
ENTRY = struct.Struct("<HHIQ")
"""Kind, version, bytes of this header, bytes of the payload behind it."""
ARCH = struct.Struct("<I")
ARCH_AT = 28
"""Offset of the architecture in an entry: 90 for sm_90."""
PTX, ELF = 1, 2


class Entry(NamedTuple):
    """An entry or container: `start` in the file, and `size` in bytes, with its header."""

    kind: int
    arch: int
    start: int
    size: int


Container = tuple[int, int, list[Entry]]
"""A fat binary: its start, the start of its entries, and the entries."""


def containers(data: bytes) -> Iterator[Container]:
    """Every fat binary of a file. Bytes that only look like the start of one are skipped."""
    at = data.find(MAGIC.to_bytes(4, "little"))
    while at >= 0:
        found = _container(data, at)
        if found is not None:
            yield found
        after = at + 1 if found is None else found[1] + sum(entry.size for entry in found[2])
        at = data.find(MAGIC.to_bytes(4, "little"), after)


def _container(data: bytes, start: int) -> Container | None:
    """The fat binary at `start`; None if there is none."""
    if start + CONTAINER.size > len(data):
        return None
    _, version, header, size = CONTAINER.unpack_from(data, start)
    entries, at, end = [], start + header, start + header + size
    if version != 1 or header < CONTAINER.size or end > len(data):
        return None
    while at < end:
        if at + ARCH_AT + ARCH.size > end:
            return None
        kind, _, own, payload = ENTRY.unpack_from(data, at)
        if kind not in (PTX, ELF) or own < ARCH_AT + ARCH.size or at + own + payload > end:
            return None
        entries.append(Entry(kind, ARCH.unpack_from(data, at + ARCH_AT)[0], at, own + payload))
        at += own + payload
    return start, start + header, entries


def used(entries: Sequence[Entry], arch: int) -> list[Entry]:
    """The newest entries that a device of the architecture uses: its machine code, or else PTX."""
    code = [e for e in entries if e.kind == ELF and e.arch // 10 == arch // 10 and e.arch <= arch]
    chosen = code or [e for e in entries if e.kind == PTX and e.arch <= arch]
    newest = max((entry.arch for entry in chosen), default=0)
    return [entry for entry in chosen if entry.arch == newest]


def prune(data: bytearray, arch: int) -> tuple[int, int]:
    """Removes the code that a device of the architecture does not use; returns bytes kept and
    removed.

    Raises:
        ValueError: there is no fat binary, or none has code for this architecture.
    """
    kept = gone = 0
    for start, first, entries in list(containers(bytes(data))):
        stays = used(entries, arch)
        if not stays:
            continue
        parts = b"".join(data[entry.start : entry.start + entry.size] for entry in stays)
        size = sum(entry.size for entry in entries)
        SIZE.pack_into(data, start + SIZE_AT, len(parts))
        data[first : first + size] = parts.ljust(size, b"\0")
        kept, gone = kept + len(parts), gone + size - len(parts)
    if not kept:
        raise ValueError(
            f"--arch {arch}: the file has no code for it. Name another architecture, or another "
            "file."
        )
    return kept, gone


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="prune_fatbins.py", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--arch", type=int, default=90, help="90 for Hopper")
    options = parser.parse_args(arguments)
    data = bytearray(options.source.read_bytes())
    try:
        kept, gone = prune(data, options.arch)
    except ValueError as error:
        parser.error(str(error))
    options.target.parent.mkdir(parents=True, exist_ok=True)
    options.target.write_bytes(data)
    shutil.copymode(options.source, options.target)
    print(f"{kept / 2**20:.1f} MiB of code kept, {gone / 2**20:.1f} MiB removed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
