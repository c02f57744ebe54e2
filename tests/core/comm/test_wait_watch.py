"""Ranks that can never go on raise one error that names both places; ranks that are late do not."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest

from megatron_fsdp_adapter.core.comm import wait_watch
from tests.lib.plain.waits import LATE, WAYS, error_of, reported
from tests.lib.ranks.launch import run_ranks, settle_ranks

CHECKS = (
    "core/comm/wait_watch.py",
    "core/comm/abort.py",
    "build/fault_report.py",
    "core/engine/launches.py",
)

TIMEOUT_S = 120.0
"""Of the process groups of `settle_ranks`. Nothing here may come near it."""

QUICK = ("a tower on one rank", "an exception")
ALONE = ("an exception", "an early end", "an evaluation beside a barrier")
"""Of these ways one rank ends in another error, or waits in a collective of gloo that nothing can
interrupt."""


def _full(names: Any, quick: tuple[str, ...]) -> list[Any]:
    return [pytest.param(n, marks=() if n in quick else pytest.mark.full) for n in names]


@pytest.mark.parametrize("name", _full(WAYS, QUICK))
def test_ranks_that_differ_raise_one_error_within_seconds(name: str) -> None:
    _, told = WAYS[name]
    (ok, found), (other_ok, other) = settle_ranks(error_of, 2, name, timeout=90.0, grace=30.0)
    assert ok, found
    text, seconds = found
    assert told in text, text
    assert "wait for each other and can never go on: rank 0 waits for" in text, text
    assert seconds < TIMEOUT_S / 2
    if name not in ALONE:
        assert other_ok and other[0] == text, (text, other)


@pytest.mark.parametrize("name", _full(LATE, ("data",)))
def test_a_rank_that_is_late_is_reported_once_and_no_error(name: str) -> None:
    _, told = LATE[name]
    late = run_ranks(reported, 2, name)
    for lines, weights in late:
        assert all("can never go on" not in line for line in lines), lines
        assert weights == late[0][1]
    lines = late[0][0]
    matching = [line for line in lines if told and told in line]
    assert len(matching) == (1 if told else 0), lines
    assert all("rank 0 has waited" in line for line in matching)


@dataclass
class Handle:
    """A handle of torch: how long each wait lasts, how it ends, and whether it is completed."""

    seconds: float = 0.0
    error: str = ""
    completed: bool = False

    def wait(self, timeout: timedelta | None = None) -> None:
        time.sleep(self.seconds)
        if self.error:
            raise RuntimeError(self.error)

    def is_completed(self) -> bool:
        return self.completed


def test_a_slice_that_is_over_is_no_end() -> None:
    assert not wait_watch.has_ended(Handle(wait_watch.SLICE.total_seconds(), "timed out"))
    assert wait_watch.has_ended(Handle())


@pytest.mark.parametrize("completed", [True, False])
def test_a_collective_that_has_failed_raises_its_error(completed: bool) -> None:
    """Gloo's reduce-scatter is never completed once it has failed."""
    with pytest.raises(RuntimeError, match="connection closed"):
        wait_watch.has_ended(Handle(error="connection closed", completed=completed))


def test_the_watch_of_a_world_of_one_or_of_a_pretended_one_is_none(two_ranks: None) -> None:
    assert wait_watch.watch_world() is None


EXITS = """
import contextlib
import threading
from datetime import timedelta

import torch.distributed as dist

from megatron_fsdp_adapter.core.comm import wait_watch

begun = threading.Event()


def look(self):
    begun.set()
    while not self._over.is_set():
        with contextlib.suppress(RuntimeError):
            self._store.wait(["a key that nobody sets"], timedelta(milliseconds=20))


wait_watch.POLL_S = 0.01
wait_watch.WaitWatch._look = look
store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
watch = wait_watch.WaitWatch(0)
begun.wait()
dist.destroy_process_group()
"""


def test_a_process_may_end_while_the_watch_asks_the_store() -> None:
    """Before Python 3.13 a thread in a call of the store then aborted the process."""
    done = subprocess.run([sys.executable, "-c", EXITS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
