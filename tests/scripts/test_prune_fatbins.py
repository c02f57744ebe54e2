"""Fat binaries of one architecture, on files that are put together here."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from scripts import prune_fatbins

PTX, ELF = prune_fatbins.PTX, prune_fatbins.ELF


def entry(kind: int, arch: int, payload: bytes, header: int = 64) -> bytes:
    start = struct.pack("<HHIQIIHHI", kind, 0x101, header, len(payload), 0, 0, 0, 0, arch)
    return start.ljust(header, b"h") + payload


def container(*entries: bytes) -> bytes:
    body = b"".join(entries)
    return struct.pack("<IHHQ", prune_fatbins.MAGIC, 1, 16, len(body)) + body


def listed(data: bytes) -> list[list[tuple[int, int, bytes]]]:
    return [
        [(e.kind, e.arch, data[e.start + e.size - 8 : e.start + e.size]) for e in entries]
        for _, _, entries in prune_fatbins.containers(data)
    ]


HOPPER = entry(ELF, 90, b"hopper  " * 3)
OTHERS = (entry(ELF, 80, b"ampere  " * 2), entry(ELF, 100, b"newer   " * 9, header=112))
PTX_80, PTX_90 = entry(PTX, 80, b"ptx80   "), entry(PTX, 90, b"ptx90   ", header=96)
PTX_120 = entry(PTX, 120, b"ptx120  ")


def test_what_the_device_uses_stays_and_nothing_moves_outside_of_its_container() -> None:
    parts = [
        b"before  ", container(OTHERS[0], HOPPER, OTHERS[1], PTX_120),
        b"between ", container(*OTHERS, PTX_120, PTX_80, PTX_90),
        b"behind  ", container(OTHERS[1], PTX_120), b"end     ",
    ]  # fmt: skip
    data = bytearray(b"".join(parts))
    before = bytes(data)
    kept, gone = prune_fatbins.prune(data, 90)
    assert len(data) == len(before)
    assert listed(data) == [
        [(ELF, 90, b"hopper  ")], [(PTX, 90, b"ptx90   ")],
        [(ELF, 100, b"newer   "), (PTX, 120, b"ptx120  ")],
    ]  # fmt: skip
    assert kept == len(HOPPER) + len(PTX_90)
    assert gone == len(parts[1]) + len(parts[3]) - 32 - kept
    at = 0
    for part in parts:
        if len(part) == 8 or part is parts[5]:
            assert data[at : at + len(part)] == part
        at += len(part)
    assert b"ampere" not in data and data.count(b"newer") == 9


def test_an_older_minor_version_is_machine_code_and_a_newer_one_is_none() -> None:
    data = bytearray(container(entry(ELF, 80, b"older   "), entry(ELF, 89, b"newer   "), PTX_80))
    prune_fatbins.prune(data, 86)
    assert listed(data) == [[(ELF, 80, b"older   ")]]


@pytest.mark.parametrize(
    "data", [b"", b"no fat binary", container(HOPPER)[:40], container(PTX_120)]
)
def test_a_file_without_code_for_the_device_is_an_error(data: bytes, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "folder" / "target"
    source.write_bytes(data)
    with pytest.raises(SystemExit):
        prune_fatbins.main([str(source), str(target)])
    assert not target.exists()
    source.write_bytes(container(HOPPER) + data)
    assert prune_fatbins.main([str(source), str(target)]) == 0
    assert (ELF, 90, b"hopper  ") in listed(target.read_bytes())[0]
