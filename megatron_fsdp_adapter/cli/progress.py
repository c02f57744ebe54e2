"""How far a command is: a bar on a terminal where `tqdm` is installed, else a line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SECONDS_BETWEEN_LINES = 10.0

Progress = Callable[[str, int], None]


@contextmanager
def progress_bar(quiet: bool) -> Iterator[Callable[[int], Progress]]:
    """Gives a function that takes the bytes in all and returns what is called after each block."""
    bars = []

    def begin(total: int) -> Progress:
        if quiet:
            return lambda name, nbytes: None
        try:
            from tqdm import tqdm
        except ModuleNotFoundError:
            return _lines(total)
        if not sys.stderr.isatty():
            return _lines(total)
        bar = tqdm(total=total, unit="B", unit_scale=True, unit_divisor=1024, file=sys.stderr,
                   mininterval=0.5, dynamic_ncols=True)  # fmt: skip
        bars.append(bar)

        def advance(name: str, nbytes: int) -> None:
            bar.set_postfix_str(name[-48:], refresh=False)
            bar.update(nbytes)

        return advance

    try:
        yield begin
    finally:
        for bar in bars:
            bar.close()


def _lines(total: int) -> Progress:
    done, last = 0, time.monotonic()

    def advance(name: str, nbytes: int) -> None:
        nonlocal done, last
        done += nbytes
        if done == total or time.monotonic() - last > SECONDS_BETWEEN_LINES:
            last = time.monotonic()
            share = 100 * done // max(total, 1)
            print(f"{share:3d}% of {size_text(total)}: {name}", file=sys.stderr)

    return advance


def size_text(nbytes: int) -> str:
    """A size for people, in powers of 1024."""
    value, units = float(nbytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.0f} {units[0]}" if units[0] == "B" else f"{value:.1f} {units[0]}"
