"""Options that follow from other options: what was set for the user, and why, as one table."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Change:
    """An option or environment variable that was set, its value before and after, and the reason.

    `before` is None where there was no value.
    """

    option: str
    before: Any
    after: Any
    reason: str


def format_changes(title: str, changes: Iterable[Change]) -> str:
    """A title line and one aligned line for each change; "nothing to set" if there is none."""
    rows = [
        (change.option, f"{_shown(change.before)} -> {_shown(change.after)}", change.reason)
        for change in changes
    ]
    if not rows:
        return f"{title}: nothing to set"
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    lines = [
        f"  {option:<{widths[0]}}  {values:<{widths[1]}}  {reason}"
        for option, values, reason in rows
    ]
    return "\n".join([title, *lines])


def _shown(value: Any) -> str:
    return "unset" if value is None else str(value)
