"""What happens to a process at a random moment of its saves.

It is killed, gets SIGTERM, its disk is full, or it is slow, so that two jobs meet everywhere.

Moments are counted in operations on the file system below a root. Python announces most of them by
audit events. The others, writing and syncing, are patched.
"""

from __future__ import annotations

import ctypes
import errno
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from megatron_fsdp_adapter.checkpoint.digests import DigestingFile

_CHANGES = ("os.rename", "os.mkdir", "os.remove", "os.rmdir")
_NEEDS_SPACE = ("open", "os.mkdir", "os.rename", "write", "fsync")
NO_SPACE = "No space left on device"


@dataclass(frozen=True)
class Fire:
    """kind: "kill", "term" or "full"; at: number of the first operation that it meets; rank: the
    one that it happens to; lasts: operations for which the disk is full. pause: longest pause
    before an operation, in seconds."""

    kind: str = ""
    at: int = 0
    rank: int = 0
    lasts: int = 0
    pause: float = 0.0


class Operations:
    """Counts this process's operations below `root`, and lets `fire` happen."""

    def __init__(self, root: Path, fire: Fire, rank: int, seed: int) -> None:
        self._root = str(root)
        self._fire = fire
        self._hits = fire.kind if fire.rank == rank else ""  # else it is only slow
        self._random = random.Random(seed)
        self.seen = 0

    def watch(self) -> None:
        """From now on, until the process ends."""
        sys.addaudithook(self._hook)
        fsync = os.fsync
        start = DigestingFile.__init__

        def synced(descriptor: int) -> None:
            self._meet("fsync")
            fsync(descriptor)

        def started(file: DigestingFile, path: Path) -> None:
            start(file, path)
            file._file = cast(Any, _Watched(file._file, self._meet))

        os.fsync = synced
        DigestingFile.__init__ = started  # type: ignore[method-assign]

    def _hook(self, event: str, given: Any) -> None:
        if event == "open":
            path, _, flags = given
            changes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        elif event in _CHANGES:
            path, changes = given[0], True
        else:
            return
        if changes and str(path).startswith(self._root):
            self._meet(event)

    def _meet(self, operation: str) -> None:
        self.seen += 1
        fire = self._fire
        if fire.pause and self._random.random() < 0.3:
            time.sleep(self._random.uniform(0, fire.pause))
        if self._hits == "full":
            is_full = fire.at <= self.seen < fire.at + fire.lasts
            if is_full and operation in _NEEDS_SPACE:
                raise OSError(errno.ENOSPC, NO_SPACE, self._root)
        elif self._hits and self.seen == fire.at:
            os.kill(os.getpid(), signal.SIGKILL if self._hits == "kill" else signal.SIGTERM)


class _Watched:
    """A file whose writes are met."""

    def __init__(self, file: Any, meet: Callable[[str], None]) -> None:
        self._file = file
        self._meet = meet

    def write(self, data: Any) -> Any:
        self._meet("write")
        return self._file.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> _Watched:
        return self

    def __exit__(self, *given: Any) -> Any:
        return self._file.__exit__(*given)


_NEW_MOUNTS, _PRIVATE, _REMOUNT = 0x00020000, 1 << 18 | 1 << 14, 1 << 5


class SmallDisk:
    """A file system of a few KiB at `folder`, which this process and its children see."""

    def __init__(self, folder: Path, nbytes: int) -> None:
        """Raises OSError where a process may not mount."""
        self._folder = str(folder).encode()
        self._c = ctypes.CDLL(None, use_errno=True)
        self._call(self._c.unshare, _NEW_MOUNTS)
        self._call(self._c.mount, b"none", b"/", None, _PRIVATE, None)
        self._mount(0, nbytes)

    def grow(self, nbytes: int) -> None:
        """As when files of other programs are deleted."""
        self._mount(_REMOUNT, nbytes)

    def _mount(self, flags: int, nbytes: int) -> None:
        size = f"size={nbytes}".encode()
        self._call(self._c.mount, b"tmpfs", self._folder, b"tmpfs", flags, size)

    @staticmethod
    def _call(function: Callable[..., int], *args: Any) -> None:
        if function(*args) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
