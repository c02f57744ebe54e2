"""Progress of a command, as lines on stderr, and sizes as text."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

SECONDS_BETWEEN_LINES = 10.0

Progress = Callable[[str, int], None]


def progress_lines(quiet: bool) -> Callable[[int], Progress]:
    """A function from total bytes to the `Progress` that is called after each block."""

    def begin(total: int) -> Progress:
        done, last = 0, time.monotonic()

        def advance(name: str, nbytes: int) -> None:
            nonlocal done, last
            done += nbytes
            if done == total or time.monotonic() - last > SECONDS_BETWEEN_LINES:
                last = time.monotonic()
                share = 100 * done // max(total, 1)
                print(f"{share:3d}% of {size_text(total)}: {name}", file=sys.stderr)

        return advance

    return (lambda total: lambda name, nbytes: None) if quiet else begin


def size_text(nbytes: int) -> str:
    """A readable size, in powers of 1024."""
    value, units = float(nbytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.0f} {units[0]}" if units[0] == "B" else f"{value:.1f} {units[0]}"
