"""The last launches of a rank, printed before NCCL gives up on one.

On a GPU the host waits for no collective. When another rank is dead or late the host comes to a
stop at some later point, and NCCL's watchdog ends the process at the timeout of the process group
with a message of its own, which knows sizes and no names. So this rank's last launches are noted,
and printed once if nothing was launched for half of that time. The collective that hangs is among
them. Polling an event of each collective was rejected: calls to CUDA for every launch of a run in
which nothing hangs.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable

KEPT = 8
"""Launches that are printed: more than are ever in flight at once."""

class LaunchLog:
    """The last launches of one engine. `patience` is in seconds; a thread looks from the first
    `note` on, and ends with this object."""

    def __init__(self, patience: float, report: Callable[[str], None] | None = None) -> None:
        self.patience = patience
        self._report = report or (lambda text: print(text, file=sys.stderr, flush=True))
        self._last: deque[object] = deque(maxlen=KEPT)
        self._at, self._is_reported = time.monotonic(), True
        self._over = threading.Event()
        self._started = False
        weakref.finalize(self, self._over.set)

    def note(self, launch: object) -> None:
        """Records a launched collective, printed as `str(launch)`. It must keep no buffers
        alive."""
        self._last.append(launch)
        self._at, self._is_reported = time.monotonic(), False
        if not self._started:
            self._started = True
            arguments = (weakref.ref(self), self._over, self.patience / 4)
            threading.Thread(target=_watch, args=arguments, daemon=True).start()

    def rest(self) -> None:
        """A collective went into a CUDA graph: from now on nothing may be launched for long while
        all is well. Prints nothing until the next `note`."""
        self._is_reported = True

    def look(self, now: float) -> None:
        """Prints the last launches if they are too long ago and were not printed yet."""
        if self._is_reported or now - self._at < self.patience:
            return
        self._is_reported = True
        lines = "\n".join(f"  - {launch}" for launch in list(self._last))
        self._report(
            f"nothing was launched for {now - self._at:.0f} s. If the process group ends this "
            "process at its timeout, one of these has not completed, because another rank has "
            "failed, is late, or took another path through the model:\n"
            f"{lines}"
        )


def _watch(
    log: Callable[[], LaunchLog | None], over: threading.Event, interval: float
) -> None:
    while not over.wait(interval):
        alive = log()
        if alive is None:
            return
        alive.look(time.monotonic())
        del alive
