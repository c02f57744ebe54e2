"""The error about a command or an option that there is not."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

LIKENESS = 0.75
"""Lowest ratio of `difflib` for a name to be suggested."""


def unknown(kind: str, given: str, known: Iterable[str]) -> str:
    """The line that says that `given` is unknown, and which known one may be meant. kind: "option",
    "argument" or "command"."""
    near = difflib.get_close_matches(given, list(known), n=1, cutoff=LIKENESS)
    suggestion = f". Did you mean `{near[0]}`?" if near else ""
    return f"unknown {kind} `{given}`{suggestion}"


def of_others(given: str, command: str, others: Sequence[str]) -> str:
    """The line that says that an option is not one of `command`, but one of `others`."""
    commands = " and ".join(f"`{name}`" for name in others)
    return f"`{given}` is an option of {commands}, not of `{command}`. See `{command} --help`"
