"""Digests of a checkpoint's files: `digests.json` in its folder, computed while data is written.

The digest is CRC-32 (zlib), which finds damage at the least cost of the standard library's digests.
torch.save's own checksums are switched off during a save, because no reader checks them. CRC-32
does not protect against forgery, but a load has to trust the checkpoint anyway, since it unpickles
objects.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

DIGESTS = "digests.json"
ALGORITHM = "crc32"
_PIECE = 4 << 20

Progress = Callable[[int, int], object]
"""Called, from several threads, with the amount done since its last call (such as bytes), and with
the total."""


def silent(done: int, total: int) -> None:
    """A `Progress` that shows nothing."""


FileDigest = tuple[int, int]
"""Size of a file in bytes, and the CRC of all of them."""


class DigestingFile:
    """A file that is written sequentially and keeps the CRC of what was written.

    Leaving the `with` block forces the file to disk. It has the file methods that `torch.save`
    calls. The first OSError is raised again on leaving the block: torch.save goes on to write the
    end of its archive, and its own error would not mention a full disk.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("wb", buffering=1 << 20)
        self._size = 0
        # The first error, with the file's path.
        self._failed: OSError | None = None
        # Of what was written so far.
        self.crc = 0

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self.crc = zlib.crc32(view, self.crc)
        self._size += len(view)
        try:
            return self._file.write(view)
        except OSError as error:
            self._note(error)
            raise

    def tell(self) -> int:
        return self._size

    def flush(self) -> None:
        """No-op: torch.save flushes after each tensor, and closing flushes once."""

    def __enter__(self) -> DigestingFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            with self._file:
                if kind is None:
                    self._file.flush()
                    os.fsync(self._file.fileno())
        except OSError as error:
            self._note(error)
        if self._failed is not None:
            raise self._failed

    def _note(self, error: OSError) -> None:
        if self._failed is None:
            self._failed = OSError(error.errno, error.strerror, str(self._path))


def digest_of(path: Path, advance: Callable[[int], object] = lambda _: None) -> FileDigest:
    """The digest of an existing file. advance: called with the length of each piece."""
    crc = 0
    size = 0
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            crc = zlib.crc32(piece, crc)
            size += len(piece)
            advance(len(piece))
    return size, crc


def write_digests(folder: Path, files: Mapping[str, FileDigest]) -> None:
    """Writes `digests.json`. Not forced to disk."""
    table = {}
    for name, (size, crc) in sorted(files.items()):
        table[name] = {"bytes": size, ALGORITHM: [f"{crc:08x}"]}
    text = json.dumps({"algorithm": ALGORITHM, "files": table})
    (folder / DIGESTS).write_text(text + "\n")


def read_digests(folder: Path) -> dict[str, FileDigest] | None:
    """Digests by file name, or None if the folder has none. Raises ValueError if they are
    damaged."""
    path = folder / DIGESTS
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text())
        if content["algorithm"] != ALGORITHM:
            raise ValueError(f"algorithm {content['algorithm']!r} is unknown")
        found = {}
        for name, row in content["files"].items():
            # Earlier releases recorded the running CRC at the end of each item; the last is the
            # file's.
            size = int(row["bytes"])
            crcs = row[ALGORITHM] or ["0"]
            found[name] = size, int(crcs[-1], 16)
        return found
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        why = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"{path} is damaged ({why}). Delete it to load the checkpoint unchecked"
        ) from error


def check_bytes(path: Path, content: bytes) -> None:
    """Raises ValueError if `content`, a whole file, differs from its recorded digest. A folder
    without digests is not checked."""
    recorded = read_digests(path.parent)
    if recorded is None:
        return
    if recorded.get(path.name) != (len(content), zlib.crc32(content)):
        raise ValueError(f"{path.name} differs from its digest in {DIGESTS}")


def problem_of(
    path: Path, digest: FileDigest, advance: Callable[[int], object] = lambda _: None
) -> str:
    """One line about the damage of a file; empty if it has none. A file that is missing or cannot
    be read is damaged too."""
    if not path.is_file():
        return f"{path.name}: missing"
    size = path.stat().st_size
    if size != digest[0]:
        return f"{path.name}: has {size} bytes, was saved with {digest[0]}"
    try:
        same = digest_of(path, advance) == digest
    except OSError as error:
        return f"{path.name}: cannot be read ({error})"
    return "" if same else f"{path.name}: differs from its digest"


def check_folder(
    folder: Path, files: Mapping[str, FileDigest], progress: Progress = silent, jobs: int = 1
) -> list[str]:
    """The damage of all files, a line each. Checks `jobs` files at a time, in threads: reading and
    digesting release Python's lock."""
    total = sum(size for size, _ in files.values())

    def check(name: str) -> str:
        return problem_of(folder / name, files[name], lambda nbytes: progress(nbytes, total))

    with ThreadPoolExecutor(jobs) as pool:
        return [problem for problem in pool.map(check, sorted(files)) if problem]
