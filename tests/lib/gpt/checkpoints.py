"""A trainer's checkpoint by the package's own functions; collective."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_fsdp_adapter.checkpoint import (
    load_checkpoint,
    load_training_state,
    save_checkpoint,
    training_state,
)


def saved(
    trainer: Any, root: str | Path, number: int = 1, with_optimizer: bool = True, **more: Any
) -> None:
    """`more`: entries of the state beside model and optimizer."""
    state = training_state(trainer.chunks, trainer.optimizer if with_optimizer else None)
    save_checkpoint(str(root), number, {**state, **more})


def loaded(
    trainer: Any, root: str | Path, with_optimizer: bool = True, **more: Any
) -> dict[str, Any]:
    """The latest; `more` is asked for beside model and optimizer. Returns what was read."""
    optimizer = trainer.optimizer if with_optimizer else None
    state = training_state(trainer.chunks, optimizer, is_loading=True)
    _, state = load_checkpoint(str(root), {**state, **more})
    load_training_state(trainer.chunks, state, optimizer)
    return state
