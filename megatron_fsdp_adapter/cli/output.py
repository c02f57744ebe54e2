"""What commands have in common: parser, progress, answer."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from typing import Any, TypeVar

from megatron_fsdp_adapter.checkpoint.digests import Progress

SECONDS_BETWEEN_LINES = 10.0

T = TypeVar("T")


def make_parser(command: str, description: str | None) -> argparse.ArgumentParser:
    """A parser with `--json`."""
    parser = argparse.ArgumentParser(
        prog=f"python -m megatron_fsdp_adapter {command}", description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    return parser


def answer(
    given: argparse.Namespace, command: str, values: Callable[[], T], render: Callable[[T], str],
    plain: Callable[[T], Any] = lambda found: found,
) -> T | None:
    """Prints what was found as JSON (of `plain`) or text, and returns it; None for bad input, which
    is a line on stderr."""
    try:
        found = values()
    except (ValueError, OSError) as error:
        print(f"{command}: {error}", file=sys.stderr)
        return None
    print(json.dumps(plain(found), indent=2, default=_text) if given.json else render(found))
    return found


def _text(value: Any) -> str:
    """Of a value without a JSON type, such as a dtype or a path."""
    return str(value).removeprefix("torch.")


def progress_lines() -> Progress:
    """A line on stderr every few seconds."""
    done, last = 0, time.monotonic()

    def advance(name: str, nbytes: int) -> None:
        nonlocal done, last
        done += nbytes
        if time.monotonic() - last > SECONDS_BETWEEN_LINES:
            last = time.monotonic()
            print(f"{size_text(done)} read: {name}", file=sys.stderr)

    return advance


def size_text(nbytes: int) -> str:
    """A readable size, in powers of 1024."""
    value, units = float(nbytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.0f} {units[0]}" if units[0] == "B" else f"{value:.1f} {units[0]}"
