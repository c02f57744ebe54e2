"""Progress bars of commands, on stderr."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from megatron_fsdp_adapter.checkpoint.digests import Progress, silent

DELAY = 1.0
"""Seconds after which a bar appears."""


@contextlib.contextmanager
def progress_bar(title: str, unit: str = "B") -> Iterator[Progress]:
    """Shows a progress bar on stderr during a block; gives the function that advances it.

    The bar appears after `DELAY`, and is removed at the end. None appears if stderr is not a
    terminal. unit: "B" for bytes, else a noun."""
    if not sys.stderr.isatty():
        yield silent
        return
    from tqdm import tqdm

    is_bytes = unit == "B"
    with tqdm(
        desc=title,
        unit="B" if is_bytes else f" {unit}s",
        unit_scale=is_bytes,
        unit_divisor=1024,
        delay=DELAY,
        leave=False,
        file=sys.stderr,
    ) as bar:

        def advance(done: int, total: int) -> None:
            bar.total = total
            bar.update(done)

        yield advance
