"""Digests of a checkpoint's files: `digests.json` in its folder, written as the data is.

CRC-32 (zlib), for it is what finds damage at least cost: of what the standard library has it is
twice as fast as SHA-1 and SHA-256 where the processor helps all of them, and torch.save computes
one of its own, which no reader ever looks at and which is therefore switched off during a save. It
does not protect against forgery; a load unpickles objects, so it has to trust them anyway.

A file's digest runs from its first byte and is noted at the end of every item (a block of a tensor
or a pickled object). From two notes next to each other an item can be checked by itself, and all
of them together cover every byte.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from torch.distributed.checkpoint.metadata import Metadata

DIGESTS = "digests.json"
ALGORITHM = "crc32"
_PIECE = 4 << 20

Progress = Callable[[int], None]
"""Told how many bytes have been read since it was called last, from several threads."""


def nothing(_: int) -> None:
    """No progress is shown."""


@dataclass(frozen=True)
class FileDigest:
    """Running digests of a file: `crcs[i]` is that of the bytes in front of `ends[i]`.

    ends: positions in bytes, ascending; the last is the file's size. Raises ValueError if they are
    not, or not as many as the digests.
    """

    ends: tuple[int, ...]
    crcs: tuple[int, ...]

    def __post_init__(self) -> None:
        ascending = all(a < b for a, b in zip((0, *self.ends), self.ends, strict=False))
        if not ascending or len(self.ends) != len(self.crcs):
            raise ValueError(f"digests at {self.ends[:9]}... are not at ascending positions")

    @property
    def size(self) -> int:
        """Of the file, in bytes."""
        return self.ends[-1] if self.ends else 0


@dataclass(frozen=True)
class Problem:
    """Damage: the file, the bytes (None: the file as a whole), and what is wrong."""

    file: str
    start: int | None
    stop: int | None
    what: str


class DigestingFile:
    """A file that is written from front to back, whose digest is known at any time.

    Closing forces it to disk. What `torch.save` needs of a file. The first OSError is raised again
    on leaving the `with` block: torch.save, which goes on to write the end of its archive, makes
    another error of it that says nothing of a full disk.
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
        """Nothing: torch.save flushes after each tensor, closing does it once."""

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


def digest_of(path: Path) -> FileDigest:
    """Reads a file, which is taken to be as it should."""
    crc, size = 0, 0
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            crc, size = zlib.crc32(piece, crc), size + len(piece)
    return FileDigest((size,), (crc,)) if size else FileDigest((), ())


def write_digests(folder: Path, files: Mapping[str, FileDigest]) -> None:
    """Writes `digests.json`. Not forced to disk."""
    table = {
        name: {
            "bytes": digest.size,
            "ends": list(digest.ends),
            ALGORITHM: [f"{crc:08x}" for crc in digest.crcs],
        }
        for name, digest in sorted(files.items())
    }
    text = json.dumps({"algorithm": ALGORITHM, "files": table})
    (folder / DIGESTS).write_text(text + "\n")


def read_digests(folder: Path) -> dict[str, FileDigest] | None:
    """Digests by file name; None if the folder has none. Raises ValueError if they are damaged."""
    path = folder / DIGESTS
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text())
        if content["algorithm"] != ALGORITHM:
            raise ValueError(f"algorithm {content['algorithm']!r} is unknown")
        return {
            name: FileDigest(tuple(row["ends"]), tuple(int(crc, 16) for crc in row[ALGORITHM]))
            for name, row in content["files"].items()
        }
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        why = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"{path} is damaged ({why}); delete it to load the checkpoint unchecked"
        ) from error


def check_bytes(path: Path, content: bytes) -> None:
    """ValueError unless `content`, all of a file, is what its folder recorded a digest of. Nothing
    is known of a folder without digests."""
    recorded = read_digests(path.parent)
    if recorded is not None:
        saved = recorded.get(path.name)
        if saved is None or (saved.size, saved.crcs[-1:]) != (len(content), (zlib.crc32(content),)):
            raise ValueError(f"{path.name} differs from its digest in {DIGESTS}")


def check_file(
    path: Path,
    digest: FileDigest,
    progress: Progress = nothing,
    starts: Iterable[int] | None = None,
) -> list[Problem]:
    """Reads a file and compares its items with the digests.

    starts: where the items begin that are of interest (None: all of them, in order). OSErrors are
    problems too: a block that a disk cannot read is what one looks for.
    """
    name = path.name
    if not path.is_file():
        return [Problem(name, None, None, "missing")]
    size = path.stat().st_size
    if size != digest.size:
        return [Problem(name, None, None, f"has {size} bytes, was saved with {digest.size}")]
    wanted = None if starts is None else set(starts)
    found = []
    with path.open("rb", buffering=0) as file:
        start, before = 0, 0
        for end, crc in zip(digest.ends, digest.crcs, strict=True):
            if wanted is None or start in wanted:
                why = _check_item(file, (start, end), (before, crc), progress)
                found += [Problem(name, start, end, why)] if why else []
            start, before = end, crc
    return found


def check_folder(
    folder: Path, files: Mapping[str, FileDigest], progress: Progress = nothing, jobs: int = 1
) -> list[Problem]:
    """Checks all files, `jobs` at a time (reading and digesting release Python's lock)."""
    with ThreadPoolExecutor(jobs) as pool:
        parts = pool.map(
            lambda name: check_file(folder / name, files[name], progress), sorted(files)
        )
        return [problem for part in parts for problem in part]


def described(problems: Iterable[Problem], metadata: Metadata) -> list[str]:
    """One line for each problem, with the keys of the items that it hits."""
    keys: dict[tuple[str, int], str] = {
        (info.relative_path, info.offset): index.fqn
        for index, info in (metadata.storage_data or {}).items()
    }
    lines = []
    for problem in problems:
        where = problem.file
        if problem.start is not None:
            key = keys.get((problem.file, problem.start))
            where += f", bytes {problem.start} to {problem.stop}" + (f" ({key})" if key else "")
        lines.append(f"{where}: {problem.what}")
    return lines


def _check_item(
    file: BinaryIO, span: tuple[int, int], crcs: tuple[int, int], progress: Progress
) -> str:
    """What is wrong with the bytes of `span`, given the running digests before and after."""
    position, crc = span[0], crcs[0]
    try:
        file.seek(position)
        while position < span[1]:
            piece = file.read(min(_PIECE, span[1] - position))
            if not piece:
                return "ends early"
            crc, position = zlib.crc32(piece, crc), position + len(piece)
            progress(len(piece))
    except OSError as error:
        return f"cannot be read ({error})"
    return "" if crc == crcs[1] else "differs from its digest"
