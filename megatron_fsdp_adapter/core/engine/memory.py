"""Whether an engine's memory is there, by purpose: `optim/memory.py` releases it between two steps,
and restores it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from .buffer import FlatBuffer

MAIN, COMPUTE, GRADIENTS, SLOTS = "main_weights", "compute_weights", "gradients", "slots"
KINDS = (MAIN, COMPUTE, GRADIENTS, SLOTS)
READ = (MAIN, COMPUTE, SLOTS)
"""Kinds of memory that a forward pass without gradients needs."""


@dataclass
class EngineMemory:
    """Attributes:
    received: memory of exchanges of gradients. ordinary: whether that and slots are torch's own
        memory, which may go, and not registered.
    pinned_by: what has addresses of the memory, for messages ("a CUDA graph"); "" if it may go.
    away: by kind, what was given back. stash: what gave it back, if it ever was.
    """

    received: FlatBuffer | None
    ordinary: bool
    pinned_by: str = ""
    away: dict[str, Any] = field(default_factory=dict)
    stash: Any = None

    def check(self, action: str, needed: Collection[str]) -> None:
        """RuntimeError if something of `needed` is away."""
        missing = [kind for kind in self.away if kind in needed]
        if missing:
            raise RuntimeError(
                f"{action}: {', '.join(missing)} of this model were released; call "
                "return_memory(model, optimizer) first"
            )
