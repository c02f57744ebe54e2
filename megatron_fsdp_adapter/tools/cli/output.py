"""The answer that commands share."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from megatron_fsdp_adapter.checkpoint.coordination import CheckpointError
from megatron_fsdp_adapter.checkpoint.digests import Progress
from megatron_fsdp_adapter.tools.progress import progress_bar

T = TypeVar("T")

Report = dict[str, Any]
"""The findings of a command, as plain values."""


def answer(
    given: argparse.Namespace,
    command: str,
    values: Callable[[Progress], T],
    render: Callable[[T], str],
    plain: Callable[[T], Any] = lambda found: found,
    unit: str = "B",
) -> T | None:
    """Prints the findings of a command and returns them; for bad input prints a line on stderr and
    returns None.

    values: finds them; its argument advances a progress bar of `unit`. It raises ValueError or
    OSError for bad input, CheckpointError for a result that could not be written. render: makes the
    text. plain: makes the values for `--json`."""
    try:
        with progress_bar(command, unit) as advance:
            found = values(advance)
    except (ValueError, OSError, CheckpointError) as error:
        print(f"{command}: {error}", file=sys.stderr)
        return None
    if given.json:
        print(json.dumps(plain(found), indent=2, default=_text))
    else:
        print(render(found))
    return found


def _text(value: Any) -> str:
    """A value without a JSON type, such as a dtype or a path, as text."""
    return str(value).removeprefix("torch.")


def size_text(nbytes: int) -> str:
    """A readable size, in powers of 1024."""
    value = float(nbytes)
    larger_units = ["KiB", "MiB", "GiB", "TiB"]
    if value < 1024:
        return f"{value:.0f} B"
    while value >= 1024 and larger_units:
        value /= 1024
        unit = larger_units.pop(0)
    return f"{value:.1f} {unit}"
