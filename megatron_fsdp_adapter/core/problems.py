"""Raises all problems of a configuration as one error, before anything is changed."""

from __future__ import annotations


def raise_problems(subject: str, found: list[str]) -> None:
    """One ValueError with every line of `found`, if there is any."""
    if found:
        lines = "\n".join(f"  - {line}" for line in found)
        raise ValueError(f"{subject} cannot be used with this configuration:\n{lines}")
