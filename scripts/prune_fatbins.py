"""A CUDA library with the machine code of one GPU architecture: that of all others is taken out,
and zeros are in its place, so that the file compresses to a fraction.

    python scripts/prune_fatbins.py libnccl.so.2 pruned/libnccl.so.2 --arch 90

A fat binary is a container of entries, each for one architecture, machine code or PTX. A device
runs machine code of its own major version that is not newer than itself, and translates PTX that is
not. What is used moves to the front of its container, and the container ends behind it. Containers
stay where they are, and those of which the device can use nothing stay as they are.
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
"""The last of these."""
ENTRY = struct.Struct("<HHIQ")
"""Kind, version, bytes of this header, bytes of the payload behind it."""
ARCH = struct.Struct("<I")
ARCH_AT = 28
"""From the start of an entry: 90 for sm_90."""
PTX, ELF = 1, 2


class Entry(NamedTuple):
    """Of a container: `start`, from that of the file, and `size` in bytes, with its header."""

    kind: int
    arch: int
    start: int
    size: int


Container = tuple[int, int, list[Entry]]
"""Where it starts, where its entries start, and they."""


def containers(data: bytes) -> Iterator[Container]:
    """Every fat binary. Bytes that look like the start of one and are none are passed over."""
    at = data.find(MAGIC.to_bytes(4, "little"))
    while at >= 0:
        found = _container(data, at)
        if found is not None:
            yield found
        after = at + 1 if found is None else found[1] + sum(entry.size for entry in found[2])
        at = data.find(MAGIC.to_bytes(4, "little"), after)


def _container(data: bytes, start: int) -> Container | None:
    """The one at `start`; None if there is none."""
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
    """Those that a device of the architecture takes: its machine code, or else PTX; the newest."""
    code = [e for e in entries if e.kind == ELF and e.arch // 10 == arch // 10 and e.arch <= arch]
    chosen = code or [e for e in entries if e.kind == PTX and e.arch <= arch]
    newest = max((entry.arch for entry in chosen), default=0)
    return [entry for entry in chosen if entry.arch == newest]


def prune(data: bytearray, arch: int) -> tuple[int, int]:
    """Takes out what a device of the architecture does not use; bytes kept, and taken out.

    Raises:
        ValueError: there is no fat binary, or nothing in any is for this architecture.
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
            f"--arch {arch}: the file has no code for it. Name one that it has, or another file."
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
    print(f"{kept / 2**20:.1f} MiB of code kept, {gone / 2**20:.1f} MiB taken out")
    return 0


if __name__ == "__main__":
    sys.exit(main())
