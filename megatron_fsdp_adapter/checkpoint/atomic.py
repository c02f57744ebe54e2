"""Files that are replaced as a whole, and what forces files and folders to disk.

A file that replaces another, such as the tracker, is first written beside it under a temporary
name of its own. No save deletes such a file of another job. Otherwise two jobs could stop each
other: one takes the folder, the other deletes the file. A process that is killed meanwhile leaves
the file: a few bytes.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

TEMPORARY = "tmp."


def fresh_name(path: Path) -> Path:
    """A new temporary name for a file or folder that will become `path`, or that is to be
    deleted."""
    return path.with_name(f"{TEMPORARY}{path.name}.{secrets.token_hex(4)}")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a temporary name beside `path`.

    The file that the block writes there, and syncs, replaces `path` when the block ends without
    error."""
    temporary = fresh_name(path)
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_atomically(path: Path, text: str) -> None:
    """Replaces a file atomically: a killed process leaves either the old or the new text."""
    with replacing(path) as temporary:
        write_synced(temporary, text)


def write_synced(path: Path, text: str) -> None:
    """Writes a file and forces it to disk."""
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_files(paths: Iterable[Path]) -> None:
    """Forces the files to disk. torch's writer syncs before it flushes its own last buffer."""
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Forces the folder's list of names to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
