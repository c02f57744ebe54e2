"""Processes that a run of tests left behind: those that have its mark in their environment.

Children inherit the mark through any number of parents, and keep it when these end; other runs on
the same machine have other marks. A run inside of a run adds a mark of its own behind the outer.

Started as a program, with a mark: ends all that have it when its standard input has ended.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

VARIABLE = "MEGATRON_FSDP_ADAPTER_TEST_RUNS"
PROCESSES = Path("/proc")


def new_mark() -> tuple[str, str]:
    """A mark for a run, and the value of `VARIABLE` that gives it to processes."""
    mark = secrets.token_hex(8)
    return mark, " ".join([*os.environ.get(VARIABLE, "").split(), mark])


def marked(mark: str) -> Mapping[int, str]:
    """Command lines of living processes that have the mark, by process id; without this process,
    and without those that have ended and wait to be reaped. Empty where there is no /proc."""
    found = {}
    for folder in PROCESSES.glob("[0-9]*"):
        with contextlib.suppress(OSError):  # ended meanwhile, or another user's
            if mark.encode() in (folder / "environ").read_bytes():
                words = (folder / "cmdline").read_bytes().decode(errors="replace")
                found[int(folder.name)] = words.replace("\0", " ").strip()
    return {pid: words for pid, words in found.items() if words and pid != os.getpid()}


def orphans(mark: str) -> list[int]:
    """Process ids of those that have the mark and whose parent has ended."""
    return [pid for pid in marked(mark) if _parent(pid) == 1]


def _parent(pid: int) -> int:
    with contextlib.suppress(OSError):  # ended meanwhile
        text = (PROCESSES / str(pid) / "stat").read_text()
        return int(text.rpartition(")")[2].split()[1])
    return 0


def left_behind(mark: str, grace_s: float, spared: Callable[[int, str], bool]) -> Mapping[int, str]:
    """Command lines of processes that have the mark and are there after `grace_s` seconds, by
    process id; as soon as there are none, none. `spared(pid, command line)`: whether one is left
    out."""
    deadline = time.monotonic() + grace_s
    while True:
        found = {pid: words for pid, words in marked(mark).items() if not spared(pid, words)}
        if not found or time.monotonic() >= deadline:
            return found
        time.sleep(0.1)


def end(processes: Iterable[int]) -> None:
    """Kills them."""
    for pid in processes:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def end_all(mark: str) -> None:
    """Kills all that have the mark, and what they start meanwhile."""
    for _ in range(5):
        if not (found := marked(mark)):
            return
        end(found)
        time.sleep(0.2)


def wait_for(what: Callable[[], bool], seconds: float = 120.0) -> None:
    """Returns once it is so; fails if it is not within so many seconds."""
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it never came to that"
        time.sleep(0.05)


def guard(mark: str) -> subprocess.Popen[bytes]:
    """A process that ends all that have the mark as soon as this process has ended, however that
    did: killed, too, when it can end nothing itself. It does nothing if it is killed before."""
    return subprocess.Popen(
        [sys.executable, __file__, mark], stdin=subprocess.PIPE, start_new_session=True
    )


if __name__ == "__main__":
    sys.stdin.buffer.read()
    end_all(sys.argv[1])
