"""The model and optimizer part of a checkpoint, of all model chunks of a rank.

    state = {**training_state(chunks, optimizer), "iteration": 100}
    save_checkpoint(root, 100, state)

    state = {**training_state(chunks, optimizer, is_loading=True), "iteration": 0}
    iteration, state = load_checkpoint(root, state)     # written under any other split of the model
    load_training_state(chunks, state, optimizer)

These are the keys that Megatron-LM writes with `--ckpt-format fsdp_dtensor`, described in
`state/names.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from megatron_fsdp_adapter.checkpoint.state import StateDict, StateMapping
from megatron_fsdp_adapter.state.names import FP8_SCALING, MODEL

OPTIMIZER = "optimizer"
_METADATA = {"distrib_optim_sharding_type": "fsdp_dtensor"}


def model_state(chunks: Sequence[Any]) -> StateDict:
    """Main weights and persistent buffers of all model chunks (FullyShardedDataParallel) of this
    rank, by key. No collective. Raises ValueError if two chunks have the same key."""
    return merged(chunk.state_dict_for_save_checkpoint() for chunk in chunks)


def merged(states: Iterable[StateMapping]) -> StateDict:
    """The states of several model chunks as one. Raises ValueError if two have the same key."""
    found: StateDict = {}
    for state in states:
        repeated = sorted(found.keys() & state.keys())
        if repeated:
            raise ValueError(
                f"several model chunks of this rank have {', '.join(repeated[:5])} "
                f"({len(repeated)} keys). Names must be those of the whole model"
            )
        found |= state
    return found


def load_model_state(chunks: Sequence[Any], state: StateMapping, strict: bool = True) -> None:
    """Copies a (loaded) `model_state` into the chunks and refreshes their compute weights.

    Raises ValueError for values of a wrong shape and, if `strict`, for missing keys and for keys
    that no chunk has. Scaling records are optional."""
    keys_of_chunks = [chunk.checkpoint_keys() for chunk in chunks]
    if strict:
        homeless = set(state).difference(*keys_of_chunks)
        unknown = sorted(key for key in homeless if not key.endswith(FP8_SCALING))
        if unknown:
            raise ValueError(f"no model chunk of this rank has {', '.join(unknown)}")
    for chunk, keys in zip(chunks, keys_of_chunks, strict=True):
        mine = {key: value for key, value in state.items() if key in keys}
        chunk.load_state_dict(mine, strict=strict)


def training_state(
    chunks: Sequence[Any], optimizer: Any | None = None, is_loading: bool = False
) -> StateDict:
    """Model and, if given, Megatron's optimizer, in the structure of a checkpoint. No collective.

    The model's state comes first: it makes the wrappers show the sharded parameters, which the
    optimizer has.
    """
    state: StateDict = {MODEL: model_state(chunks)}
    if optimizer is not None:
        state[OPTIMIZER] = optimizer.sharded_state_dict(
            state, is_loading=is_loading, metadata=dict(_METADATA)
        )
    return state


def load_training_state(
    chunks: Sequence[Any], state: StateMapping, optimizer: Any | None = None
) -> None:
    """Copies a (loaded) `training_state` into chunks and optimizer, and refreshes every compute
    weight. Raises as `load_model_state` does."""
    load_model_state(chunks, state[MODEL])
    if optimizer is not None:
        optimizer.load_state_dict(dict(state[OPTIMIZER]))
