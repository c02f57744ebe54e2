"""A trainer's checkpoint by the package's own functions, and the state that stock DDP saves;
collective."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.core import parallel_state
from megatron.core.utils import unwrap_model

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


def stock_state(trainer: Any, is_loading: bool) -> dict[str, Any]:
    """The state that Megatron-LM saves with stock DDP and `--dist-ckpt-optim-fully-reshardable`."""
    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    state = {"model": unwrap_model(trainer.wrapper).sharded_state_dict(metadata=metadata)}
    state["optimizer"] = trainer.optimizer.sharded_state_dict(
        state, is_loading=is_loading, metadata=metadata
    )
    return state
