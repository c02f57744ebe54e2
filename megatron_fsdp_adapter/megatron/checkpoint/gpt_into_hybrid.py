"""A GPT checkpoint that is loaded into a hybrid model, as megatron-core 0.19 does.

A GPT layer is two layers of a hybrid model, one of attention and one of an MLP, and some layers of
a hybrid model have no counterpart. Megatron finds out which layer is which. It would change the
names itself, after the comparison with the checkpoint; it would leave out what the checkpoint does
not have, and give back the options of parameter groups as it was asked for them.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ...checkpoint.state import StateDict, StateMapping
from ...checkpoint.training import OPTIMIZER
from ...state.names import MODEL
from ...state.sharded_state_dict import ShardedStateDict
from ..compat.patches import Original
from .checkpoint_drivers import load_of_megatron_lm

_PART = re.compile(r"model\d*|optimizer")
_META = "param_to_group_meta"
_MAPS = "gpt_compat_layer_maps"
"""The argument of Megatron-LM's reader with the pairs of layers."""


def load(original: Original, *args: Any, **kwargs: Any) -> Any:
    """Reads a checkpoint by Megatron-LM's function (`load_of_megatron_lm`). For a GPT checkpoint
    that is loaded into a hybrid model, the state asks for the names of the checkpoint."""
    call = inspect.signature(original).bind(*args, **kwargs)
    maps = call.arguments.get(_MAPS)
    wanted: Any = call.arguments.get("sharded_state_dict")
    models = () if maps is None or wanted is None else wanted.get("_model", ())
    if not any(isinstance(model, ShardedStateDict) for model in models):
        return load_of_megatron_lm(original, *args, **kwargs)
    call.arguments[_MAPS] = None
    call.arguments["sharded_state_dict"] = as_stored(wanted, maps)
    state, *others = load_of_megatron_lm(original, *call.args, **call.kwargs)
    if state is not None:
        state = as_own(state, wanted, maps)
        _load_models(models, state)
    return (state, *others)


def stored_name(name: Any, maps: Any) -> Any:
    """The name in a GPT checkpoint of a key of a hybrid model's state; None without counterpart.

    maps: the value of `_MAPS`."""
    from megatron.core.dist_checkpointing import gpt_checkpoint_interop as interop

    if not isinstance(name, str):
        return name
    found = interop.retarget_fsdp_state_dict_to_gpt_checkpoint({name: None}, maps)
    return next(iter(found), None)


def as_stored(state: StateMapping, maps: Any) -> StateDict:
    """`state` in new containers, with model and optimizer by the names of a GPT checkpoint."""
    found = {}
    for key, part in state.items():
        found[key] = _stored(part, maps) if _is_part(key) else part
    return found


def as_own(read: StateMapping, wanted: StateMapping, maps: Any) -> StateDict:
    """The state `read`, which `as_stored` of `wanted` asked for, by the names of `wanted`. What has
    no counterpart is that of `wanted`, but for options of parameter groups: those are of the group,
    as in stock's load."""
    found = dict(read)
    for key in wanted:
        if _is_part(key):
            found[key] = _own(read[key], wanted[key], maps)
    if OPTIMIZER in wanted:
        _share_options(found[OPTIMIZER], wanted[OPTIMIZER], maps)
    return found


def _load_models(models: Sequence[Any], state: StateMapping) -> None:
    """Loads a state that was read into the model chunks. Megatron takes them for loaded, as their
    tensors were read in place; FP8 scales are set by this call alone."""
    for number, model in enumerate(models):
        key = MODEL if len(models) == 1 else f"{MODEL}{number}"
        if key in state:
            model.load_state_dict(state[key])


def _is_part(key: str) -> bool:
    return bool(_PART.fullmatch(key))


def _stored(value: Any, maps: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    found = {}
    for key, entry in value.items():
        name = stored_name(key, maps)
        if name is not None:
            found[name] = _stored(entry, maps)
    return found


def _own(read: Any, wanted: Any, maps: Any) -> Any:
    if not isinstance(wanted, Mapping):
        return read
    found = {}
    for key, entry in wanted.items():
        name = stored_name(key, maps)
        if name is None:
            found[key] = entry
        elif name in read:
            found[key] = _own(read[name], entry, maps)
    return found


def _share_options(found: Any, wanted: Any, maps: Any) -> None:
    """Sets the options of parameters without counterpart to those that were read for other members
    of their group, in place. Members of a group have the same options in `wanted`."""
    if not isinstance(wanted, Mapping):
        return
    for key, entry in wanted.items():
        if key != _META:
            _share_options(found[key], entry, maps)
            continue
        read = {}
        for name, options in entry.items():
            if stored_name(name, maps) is not None:
                read[repr(options)] = found[key][name]
        for name, options in entry.items():
            if stored_name(name, maps) is None:
                found[key][name] = read.get(repr(options), options)
