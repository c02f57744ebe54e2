"""State of an inner optimizer as a program sees it: DTensors over the local tensors' storages.

torch leaves it to programs to change `optimizer.state`: to drop it, or to put other tensors there.
So what was shown is remembered, and compared with what is there before it is read again.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ..checkpoint.chunks import dtensor_like
from ..dtensor import chunks_of

Entry = dict[str, Any]
"""State of one parameter."""


Shown = tuple[Entry, Entry, Entry]
"""The shown state of a parameter: the dict in `optimizer.state`, what was in it, and what the inner
optimizer had at that time."""


def is_same(entry: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """True if both have the same objects under the same names."""
    return entry.keys() == other.keys() and (
        all(map(operator.is_, entry.values(), other.values())) or not changed(entry, other)
    )


def changed(entry: Mapping[str, Any], before: Mapping[str, Any]) -> Entry:
    """The part of `entry` that is new, or another object than in `before`."""
    return {n: v for n, v in entry.items() if n not in before or before[n] is not v}


def are_same(params: Sequence[Any], others: Sequence[Any]) -> bool:
    """True if both have the same objects in the same order."""
    return len(params) == len(others) and all(map(operator.is_, params, others))


def is_like(value: Any, local: torch.Tensor) -> bool:
    """True if a value of a parameter's state has an element for each of its own."""
    return isinstance(value, torch.Tensor) and value.shape == local.shape and value.dim() > 0


def shown(param: Any, local: torch.Tensor, state: Entry) -> Entry:
    """State of a parameter with DTensors where it has the parameter's shape."""
    return {n: dtensor_like(param, v) if is_like(v, local) else v for n, v in state.items()}


def taken_over(param: Any, local: torch.Tensor, name: str, value: Any) -> Any:
    """The value for the inner optimizer of a `value` that a program has put into `optimizer.state`.

    Raises:
        RuntimeError: it is of the parameter's shape, and not of this rank's rows.
    """
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return value
    own = getattr(value, "_local_tensor", value)
    of_others = isinstance(value, DTensor) and _boxes(value) not in (None, _boxes(param))
    if value.shape == param.shape and (own.shape != local.shape or of_others):
        raise RuntimeError(
            f"optimizer.state[param][{name!r}] of a parameter of shape {tuple(param.shape)}: a "
            f"{type(value).__name__} has other rows than this rank. Put torch.zeros_like(param) "
            "there, or a tensor computed from the one that was there"
        )
    return own


def _boxes(value: DTensor) -> Any:
    found = chunks_of(value)
    return None if found is None else found.boxes
