"""Kinds of an engine's memory by purpose: `optim/memory.py` releases it between two steps, and
restores it."""

from __future__ import annotations

from collections.abc import Collection

MAIN, COMPUTE, GRADIENTS, SLOTS = "main_weights", "compute_weights", "gradients", "slots"
KINDS = (MAIN, COMPUTE, GRADIENTS, SLOTS)
READ = (MAIN, COMPUTE, SLOTS)
"""Kinds of memory that a forward pass without gradients needs."""


def check_here(away: Collection[str], action: str, needed: Collection[str]) -> None:
    """RuntimeError if something of `needed` is `away`."""
    missing = [kind for kind in away if kind in needed]
    if missing:
        raise RuntimeError(
            f"{action}: {', '.join(missing)} of this model were released. Call "
            "return_memory(model, optimizer) first"
        )
