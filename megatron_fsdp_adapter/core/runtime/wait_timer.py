"""Measures how long compute waits for communication, in a step that is chosen for it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

Instant = torch.cuda.Event | float
"""A moment: an event of the current stream, or the host's clock in seconds."""


class WaitTimer:
    """Waits of the compute stream from now until `stop`. A runtime that has one measures them.

    On a GPU the device measures: the host does not wait, except in `seconds` and `waited`.

    device: where compute runs.
    """

    def __init__(self, device: torch.device) -> None:
        self._has_events = device.type == "cuda"  # else the host's clock is read
        self._begin = self._now()  # when it was made
        self._end: Instant | None = None  # when it was stopped
        self._waits: list[tuple[Instant, Instant]] = []  # begin and end of each wait

    @contextmanager
    def wait(self) -> Iterator[None]:
        """Inside, compute waits."""
        begin = self._now()
        yield
        self._waits.append((begin, self._now()))

    def stop(self) -> None:
        self._end = self._now()

    def seconds(self) -> float:
        """From the beginning to `stop`. The host waits until the device has passed that."""
        assert self._end is not None
        return _between(self._begin, self._end)

    def waited(self) -> float:
        """Seconds of all waits."""
        return sum(_between(*wait) for wait in self._waits)

    def _now(self) -> Instant:
        if not self._has_events:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _between(begin: Instant, end: Instant) -> float:
    """Seconds."""
    if isinstance(begin, float):
        assert isinstance(end, float)
        return end - begin
    assert not isinstance(end, float)
    end.synchronize()
    return begin.elapsed_time(end) / 1000
