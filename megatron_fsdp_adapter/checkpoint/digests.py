"""Digests of a checkpoint's files: `digests.json` in its folder, computed while data is written.

The digest is CRC-32 (zlib), which finds damage at the least cost of the standard library's digests.
torch.save's own checksums are switched off during a save, because no reader checks them. CRC-32
does not protect against forgery, but a load has to trust the checkpoint anyway, since it unpickles
objects.

A file's running digest is recorded at the end of every item (a block of a tensor or a pickled
object). An item is checked from two neighboring records alone, and all records together cover every
byte.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

from torch.distributed.checkpoint.metadata import Metadata

DIGESTS = "digests.json"
ALGORITHM = "crc32"
_PIECE = 4 << 20

Progress = Callable[[int, int], object]
"""Called, from several threads, with what was done since its last call, such as bytes, and with the
total."""


def silent(done: int, total: int) -> None:
    """A `Progress` that shows nothing."""


FileDigest = list[tuple[int, int]]
"""Running digests of a file: ends of its items in bytes, ascending, and the digest of all bytes
before."""

Problem = dict[str, Any]
"""Damage: file, start and stop of the bytes (None: the whole file), and what is wrong."""


class DigestingFile:
    """A file that is written sequentially and keeps its running digest.

    Closing forces it to disk. It has the file methods that `torch.save` calls. The first OSError is
    raised again on leaving the `with` block: torch.save goes on to write the end of its archive,
    and its own error would not mention a full disk.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("wb", buffering=1 << 20)
        self._size = 0
        self._failed: OSError | None = None
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


def size_of(digest: FileDigest) -> int:
    """Size of the file in bytes."""
    return digest[-1][0] if digest else 0


def digest_of(path: Path) -> FileDigest:
    """The digest of an existing file."""
    crc, size = 0, 0
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            crc, size = zlib.crc32(piece, crc), size + len(piece)
    return [(size, crc)] if size else []


def write_digests(folder: Path, files: Mapping[str, FileDigest]) -> None:
    """Writes `digests.json`. Not forced to disk."""
    table = {
        name: {
            "bytes": size_of(digest),
            "ends": [end for end, _ in digest],
            ALGORITHM: [f"{crc:08x}" for _, crc in digest],
        }
        for name, digest in sorted(files.items())
    }
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
        return {
            name: list(zip(row["ends"], (int(crc, 16) for crc in row[ALGORITHM]), strict=True))
            for name, row in content["files"].items()
        }
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        why = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"{path} is damaged ({why}). Delete it to load the checkpoint unchecked"
        ) from error


def check_bytes(path: Path, content: bytes) -> None:
    """Raises ValueError if `content`, a whole file, differs from its recorded digest. A folder
    without digests is not checked."""
    recorded = read_digests(path.parent)
    if recorded is not None:
        saved = recorded.get(path.name) or [(-1, 0)]
        if saved[-1] != (len(content), zlib.crc32(content)):
            raise ValueError(f"{path.name} differs from its digest in {DIGESTS}")


def check_file(
    path: Path, digest: FileDigest, advance: Callable[[int], object] = lambda _: None
) -> list[Problem]:
    """Reads a file and compares its items with the digests.

    An OSError is reported as a problem, because unreadable blocks are a kind of damage.
    """
    name = path.name
    size = path.stat().st_size if path.is_file() else None
    if size != (saved := size_of(digest)):
        what = "missing" if size is None else f"has {size} bytes, was saved with {saved}"
        return [{"file": name, "start": None, "stop": None, "what": what}]
    found = []
    with path.open("rb", buffering=0) as file:
        start, before = 0, 0
        for end, crc in digest:
            file.seek(start)
            if what := _check_item(file, end - start, before, crc, advance):
                found.append({"file": name, "start": start, "stop": end, "what": what})
            start, before = end, crc
    return found


def check_folder(
    folder: Path, files: Mapping[str, FileDigest], progress: Progress = silent, jobs: int = 1
) -> list[Problem]:
    """Checks all files, `jobs` at a time (reading and digesting release Python's lock)."""
    total = sum(map(size_of, files.values()))

    def check(name: str) -> list[Problem]:
        return check_file(folder / name, files[name], lambda nbytes: progress(nbytes, total))

    with ThreadPoolExecutor(jobs) as pool:
        parts = pool.map(check, sorted(files))
        return [problem for part in parts for problem in part]


def described(problem: Problem, metadata: Metadata) -> str:
    """The problem as a line, with the key of the damaged item."""
    name, start, stop = (problem[field] for field in ("file", "start", "stop"))
    keys = [
        index.fqn for index, info in (metadata.storage_data or {}).items()
        if (info.relative_path, info.offset) == (name, start)
    ]
    place = "" if start is None else f", bytes {start} to {stop}"
    return f"{name}{place}{''.join(f' ({key})' for key in keys)}: {problem['what']}"


def _check_item(
    file: BinaryIO, size: int, crc: int, wanted: int, advance: Callable[[int], object]
) -> str:
    """The problem with the next `size` bytes ("" if none), by the running digests before and
    after."""
    try:
        while size:
            piece = file.read(min(_PIECE, size))
            if not piece:
                return "ends early"
            crc, size = zlib.crc32(piece, crc), size - len(piece)
            advance(len(piece))
    except OSError as error:
        return f"cannot be read ({error})"
    return "" if crc == wanted else "differs from its digest"
