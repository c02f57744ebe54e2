"""Values of a state dict, and where they go in the state of an optimizer on local shards."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ..checkpoint.chunks import dtensor_like
from ..dtensor import chunks_of
from ..sharding.model_state import Piece, Place, piece_of, write_pieces
from .state_init import COUNT
from .state_view import Entry


def load_values(optimizer: Any, groups: list[dict[str, Any]], state: dict[Any, Entry]) -> None:
    """Replaces the state of an optimizer on local shards by `state`, by the keys in `groups`; what
    is not in it goes. ValueError as `_sorted_out`, and as `write_pieces`."""
    shards = optimizer._fsdp_shards
    keyed = [
        pair for group, saved in zip(optimizer.param_groups, groups, strict=True)
        for pair in zip(group["params"], saved["params"], strict=True)
    ]  # fmt: skip
    like, others = _sorted_out(optimizer, keyed, state)
    write_pieces(
        {label: piece for label, (_, _, piece, _) in like.items()},
        {label: value for label, (_, _, _, value) in like.items()},
    )
    for param, name, piece, _ in like.values():
        if piece.target is not optimizer.state[param].get(name):
            shards.put(param, name, piece.target._local_tensor)
    for param, name, value in others:
        target = optimizer.state[param].get(name)
        if isinstance(target, torch.Tensor):
            target.copy_(torch.as_tensor(value).view(target.shape))
        else:
            shards.put(param, name, copy.deepcopy(getattr(value, "_local_tensor", value)))
    for param, key in keyed:
        loaded = state.get(key, {})
        gone = [name for name in optimizer.state.get(param, {}) if name not in loaded]
        if gone:
            shards.drop(param, gone)
    shards.show_state(optimizer)


Moment = tuple[Any, str, Piece, torch.Tensor]
"""A parameter, the name of state with rows like it, where that goes, and the value for it, a
DTensor or a plain whole tensor."""


def _sorted_out(
    optimizer: Any, keyed: Sequence[tuple[Any, Any]], state: dict[Any, Entry]
) -> tuple[dict[str, Moment], list[tuple[Any, str, Any]]]:
    """The values of `state` that have a parameter's rows, by what they are; parameter, name and
    value of the others. keyed: parameters and their keys. Nothing is written. ValueError naming the
    moments of a wrong shape."""
    like: dict[str, Moment] = {}
    others, wrong = [], []
    for param, key in keyed:
        for name, value in state.get(key, {}).items():
            shown = optimizer.state[param].get(name)
            new = shown is None and isinstance(value, torch.Tensor) and value.dim() > 0
            if not (new or isinstance(shown, DTensor)):
                others.append((param, name, value))
                continue
            label, fitting = f"{name} of parameter {key}", _fitting(param, value)
            if fitting is None:
                given = tuple(getattr(value, "shape", ())) or type(value).__name__
                wrong.append(f"{label}: {given} for {tuple(param.shape)}")
            else:
                target = _target(param, shown, value.dtype)
                like[label] = param, name, piece_of(target, param, Place(label)), fitting
    if wrong:
        raise ValueError(
            f"optimizer state does not have the shapes of the parameters: {', '.join(wrong[:5])} "
            f"({len(wrong)} in all). Give DTensors or whole tensors, of the same model"
        )
    return like, others


def _fitting(param: Any, value: Any) -> torch.Tensor | None:
    """`value` as a DTensor or a whole tensor, if it is one, or is this rank's rows; else None."""
    if not isinstance(value, torch.Tensor):
        return None
    if isinstance(value, DTensor):
        return value if value.shape == param.shape else None
    local = param._local_tensor
    if value.numel() == math.prod(param.fsdp_layout_ref.shape):
        return value
    if value.numel() != local.numel():
        return None
    return dtensor_like(param, value.detach().view(local.shape).to(local.device))


def _target(param: Any, shown: DTensor | None, dtype: torch.dtype) -> DTensor:
    """The tensor that a moment of `param` is written into; `shown` is what the optimizer has."""
    if shown is not None and chunks_of(shown) is not None:
        return shown
    local = param._local_tensor
    # An optimizer that made its state before it was adopted made DTensors that know no rows.
    own = torch.empty_like(local, dtype=dtype) if shown is None else shown._local_tensor
    return dtensor_like(param, own)


def load_options(group: dict[str, Any], saved: dict[str, Any]) -> None:
    """Gives a group the saved options; what is a tensor is filled. A group that had counted no step
    when it was saved has counted none then."""
    missing = {COUNT: 0} if COUNT in group else {}
    for name, value in {**missing, **saved}.items():
        if name == "params":
            continue
        if isinstance(group.get(name), torch.Tensor):
            group[name].copy_(torch.as_tensor(value).view(group[name].shape))
        else:
            group[name] = value
