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
    """Returns main weights and persistent buffers of a Megatron model, by key. Not collective.

    Keys are those of `--ckpt-format fsdp_dtensor`: names in the whole model, over all stages.

    Examples:
        >>> state = model_state([model])  # model: of FullyShardedDataParallel
        >>> state["module.decoder.final_layernorm.weight"].shape
        torch.Size([12])

    Args:
        chunks: the wrapped model chunks of this rank: one, or several with virtual stages.

    Raises:
        ValueError: two chunks have the same key.
    """
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
    """Copies a state into a Megatron model, and updates the compute weights.

    Examples:
        >>> load_model_state([model], model_state([model]))

    Args:
        chunks: as for `model_state`.
        state: a state as `model_state` returns it, with loaded values.
        strict: True requires the keys of the chunks, and no others. Records of FP8 scaling are
            optional.

    Raises:
        ValueError: a value has another shape; with `strict`, missing or unknown keys.
    """
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
    """Returns the state of a Megatron model and of its optimizer, for a checkpoint.

    Not collective. Keys and values are those that Megatron-LM writes with
    `--ckpt-format fsdp_dtensor`.

    Examples:
        >>> state = training_state([model], optimizer)  # of get_megatron_optimizer
        >>> _ = save_checkpoint(folder, 100, {**state, "iteration": 100})
        >>> state = training_state([model], optimizer, is_loading=True)
        >>> iteration, state = load_checkpoint(folder, {**state, "iteration": 0})
        >>> load_training_state([model], state, optimizer)
        >>> sorted(state)
        ['iteration', 'model', 'optimizer']

    Args:
        chunks: as for `model_state`.
        optimizer: Megatron's optimizer. None: the model alone.
        is_loading: True for a state that `load_checkpoint` fills: optimizer state that does not
            exist yet is allocated.
    """
    # The model's state comes first: it makes the wrappers show the sharded parameters, which the
    # optimizer has.
    state: StateDict = {MODEL: model_state(chunks)}
    if optimizer is not None:
        state[OPTIMIZER] = optimizer.sharded_state_dict(
            state, is_loading=is_loading, metadata=dict(_METADATA)
        )
    return state


def load_training_state(
    chunks: Sequence[Any], state: StateMapping, optimizer: Any | None = None
) -> None:
    """Copies a state into a Megatron model and its optimizer, and updates the compute weights.

    Examples:
        >>> load_training_state([model], training_state([model], optimizer), optimizer)

    Args:
        chunks: as for `model_state`.
        state: a state as `training_state` returns it, with loaded values.
        optimizer: Megatron's optimizer. None: the model alone.

    Raises:
        ValueError: as `load_model_state`.
    """
    load_model_state(chunks, state[MODEL])
    if optimizer is not None:
        optimizer.load_state_dict(dict(state[OPTIMIZER]))
