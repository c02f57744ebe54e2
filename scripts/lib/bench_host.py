"""What the host does in a training step: every function that it calls, of Python and of C."""

from __future__ import annotations

import cProfile
import io
import pstats
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ROWS = 70
"""Functions in each table."""


class HostProfile:
    """Calls and times of functions on this thread, over several runs.

    Autograd runs backward on a thread of its own for each device; it is kept on this one here, so
    that hooks are seen. The profiler adds up to a microsecond to each call: times tell which
    functions to look at, and counts what they do; neither is what a step takes.
    """

    def __init__(self) -> None:
        self._profile = cProfile.Profile()

    def run(self, task: Callable[[], Any]) -> None:
        """Calls `task`."""
        with torch.autograd.set_multithreading_enabled(False):
            self._profile.enable()
            try:
                task()
            finally:
                self._profile.disable()

    def text(self, runs: int) -> str:
        """The functions that took most by themselves, and those that took most with all they
        called; counts and seconds are of all `runs`."""
        out = io.StringIO()
        stats = pstats.Stats(self._profile, stream=out)
        for order in ("tottime", "cumulative"):
            print(f"{runs} steps, by {order}", file=out)
            stats.sort_stats(order).print_stats(ROWS)
        return out.getvalue()

    def write(self, folder: Path, name: str, runs: int) -> None:
        """`name`.txt, the tables, and `name`.pstats, all of it for the module `pstats`."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.txt").write_text(self.text(runs))
        pstats.Stats(self._profile).dump_stats(folder / f"{name}.pstats")
