"""On a GPU the last launches are told before NCCL ends the process."""

from __future__ import annotations

import threading
import time
import weakref

from megatron_fsdp_adapter.diagnostics.late_collectives import KEPT, LaunchLog


def test_the_last_launches_are_told_once_when_nothing_follows() -> None:
    told: list[str] = []
    log = LaunchLog(1000.0, told.append)
    log.look(time.monotonic() + 5000)  # nothing was ever launched
    for number in range(KEPT + 3):
        log.note(f"launch {number} of unit x")
    log.look(time.monotonic() + 900)
    assert told == []
    log.look(time.monotonic() + 1100)
    log.look(time.monotonic() + 2200)
    assert len(told) == 1 and "nothing was launched for 1100 s" in told[0]
    assert "launch 2 of" not in told[0] and "launch 3 of" in told[0] and "launch 10" in told[0]
    log.note("another")
    log.look(time.monotonic() + 1100)
    assert len(told) == 2 and "another" in told[1]
    log.note("the last before a graph")
    log.rest()
    log.look(time.monotonic() + 1100)
    assert len(told) == 2


def test_the_thread_tells_and_ends_with_the_log() -> None:
    done = threading.Event()
    log = LaunchLog(0.2, lambda text: done.set())
    # By identity and not by number: a thread that an earlier test left may end meanwhile.
    before = set(threading.enumerate())
    log.note("a launch")
    (started,) = set(threading.enumerate()) - before
    assert done.wait(20)
    gone = weakref.ref(log)
    del log
    started.join(20)
    assert gone() is None and not started.is_alive()
    assert set(threading.enumerate()) <= before
