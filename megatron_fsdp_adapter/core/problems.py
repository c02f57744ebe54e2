"""Raises all problems of a configuration as one error, before anything is changed."""

from __future__ import annotations


class RefusedByAllRanks(ValueError):
    """Raised by every rank with the same message, which needs no traceback: the runner and
    `scripts/pretrain_gpt.py` print it once and end with status 2."""


def raise_problems(subject: str, found: list[str], kind: type[ValueError] = ValueError) -> None:
    """One error with every line of `found`, if there is any."""
    if found:
        lines = "\n".join(f"  - {line}" for line in found)
        raise kind(f"{subject} cannot be used with this configuration:\n{lines}")
