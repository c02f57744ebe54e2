"""Processes that a run of tests left behind, told by a mark in their environment.

Children inherit the mark through any number of parents, and keep it when these end; other runs on
the same machine have other marks. A run inside of a run adds a mark of its own behind the outer.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import time
from collections.abc import Mapping
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
            if f"{VARIABLE}=".encode() not in (environment := (folder / "environ").read_bytes()):
                continue
            values = dict(item.partition(b"=")[::2] for item in environment.split(b"\0"))
            if mark in values.get(VARIABLE.encode(), b"").decode().split():
                words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
                found[int(folder.name)] = " ".join(words).strip()
    return {pid: words for pid, words in found.items() if words and pid != os.getpid()}


def outlasting(mark: str, grace_s: float, spared: tuple[str, ...] = ()) -> Mapping[int, str]:
    """Those that are still there after `grace_s` seconds; as soon as there are none, none.
    `spared`: words of command lines that are left out."""
    deadline = time.monotonic() + grace_s
    while True:
        found = {
            pid: words
            for pid, words in marked(mark).items()
            if not any(word in words for word in spared)
        }
        if not found or time.monotonic() >= deadline:
            return found
        time.sleep(0.1)


def end(mark: str) -> None:
    """Kills all that have the mark, and what they start meanwhile."""
    for _ in range(5):
        found = marked(mark)
        for pid in found:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        if not found:
            return
        time.sleep(0.2)
