"""State dicts of sharded modules: under the module's own names, and under a checkpoint's.

A state dict is one of two *forms*: a map from keys to the places whose values they are. The keys
of one are the names in this rank's module tree, those of the other what `checkpoint.names` makes
of them, the same for every way to split the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .checkpoint.chunks import copy_chunks
from .checkpoint.names import EXTRA_STATE, GlobalNames
from .checkpoint.parts import held_range, part_of


@dataclass(frozen=True)
class Place:
    """What a key of a state dict stands for: piece `number` of `count` of the value that the
    module itself has under `name`."""

    name: str
    number: int = 0
    count: int = 1


Form = Mapping[str, Place]


def module_form(own: Iterable[str]) -> Form:
    """Keys as the module has them."""
    return {name: Place(name) for name in own}


def checkpoint_form(own: Iterable[str], names: GlobalNames) -> Form:
    """Keys as in a checkpoint, without `EXTRA_STATE`."""
    return {
        key: Place(name, number, len(names.suffixes(name)))
        for name in own
        if not name.endswith(EXTRA_STATE)
        for number, key in enumerate(names.keys(name))
    }


def chosen_form(forms: Sequence[Form], given: Iterable[str]) -> tuple[Form, dict[str, str]]:
    """The form that the `given` keys are of, and the form's key for each given one.

    A key may have one "module." more or less than the form's: some callers strip or add one. The
    form with the fewest unknown keys, then the fewest missing ones, is the one that is meant.
    Raises ValueError if two fit equally well and do not mean the same.
    """
    found = [(form, {key: _own_key(key, form) for key in given}) for form in forms]
    found.sort(key=_misfit)
    (best, keys), *others = found
    for form, other_keys in others:
        if _misfit((form, other_keys)) == _misfit((best, keys)) and any(
            form.get(other_keys[key]) != best.get(keys[key]) for key in keys
        ):
            raise ValueError(
                "load_state_dict: the keys may be names of this rank's modules or global names of "
                "a checkpoint, and it cannot be told which; give all keys of either"
            )
    return best, keys


def _misfit(candidate: tuple[Form, dict[str, str]]) -> tuple[int, int]:
    form, keys = candidate
    known = {key for key in keys.values() if key in form}
    return len(keys) - len(known), len(form) - len(known)


def _own_key(key: str, form: Form) -> str:
    for candidate in (key, f"module.{key}", key.removeprefix("module.")):
        if candidate in form:
            return candidate
    return key


def values_of(form: Form, params: Mapping[str, nn.Parameter], plain: Mapping[str, Any]) -> dict:
    """The form's state dict. params: optimizer parameters by the module's keys; plain: the
    module's own state dict, which has the other values. DTensors know their chunks."""
    state = {}
    for key, place in form.items():
        value = plain[place.name]
        param = params.get(place.name)
        if param is not None:
            if value is not param:
                copy_chunks(param, value)  # type: ignore[arg-type]
            value = part_of(value, param.fsdp_layout_ref, place.number, place.count)  # type: ignore[attr-defined]
        state[key] = value
    return state


def load_problems(
    form: Form, params: Mapping[str, nn.Parameter], values: Mapping[str, Any], strict: bool
) -> list[str]:
    """One line for each missing, unexpected (if `strict`) and mis-shaped value."""
    found = []
    if strict:
        found += [f"missing: {key}" for key in sorted(set(form) - set(values))
                  if not key.endswith(EXTRA_STATE)]
        found += [f"unexpected: {key}" for key in sorted(set(values) - set(form))
                  if not key.endswith(EXTRA_STATE)]
    for key, value in values.items():
        place = form.get(key)
        param = params.get(place.name) if place else None
        if place is None or param is None:
            continue
        expected = _shape_for(param, place, value)
        if tuple(value.shape) != expected:
            found.append(f"{key}: shape {tuple(value.shape)}, expected {expected}")
    return found


def copy_values(
    form: Form, params: Mapping[str, nn.Parameter], values: Mapping[str, Any]
) -> dict[str, Any]:
    """Writes what is for parameters into this rank's rows; returns the rest, by module's keys."""
    rest = {}
    for key, value in values.items():
        place = form.get(key)
        if place is None:
            continue
        if place.name in params:
            _copy_into(params[place.name], place, value)
        else:
            rest[place.name] = value
    return rest


def _shape_for(param: nn.Parameter, place: Place, value: torch.Tensor) -> tuple[int, ...]:
    """The shape that `value` must have: for a DTensor the whole tensor's, for a plain one that of
    the module's parameter, which tensor parallelism may have split."""
    shape = param.shape if hasattr(value, "_local_tensor") else param.fsdp_layout_ref.shape  # type: ignore[attr-defined]
    return (shape[0] // place.count, *shape[1:])


def _copy_into(param: nn.Parameter, place: Place, value: torch.Tensor) -> None:
    """Writes this rank's rows of `value` into its place in the optimizer parameter `param`."""
    ref = param.fsdp_layout_ref  # type: ignore[attr-defined]
    target = part_of(param, ref, place.number, place.count)._local_tensor  # type: ignore[arg-type]
    if hasattr(value, "_local_tensor"):
        source = value._local_tensor
    else:
        start = place.number * value.numel()
        held = held_range(ref)
        rows = slice(max(held.start - start, 0), max(held.stop - start, 0))
        source = value.detach().reshape(-1)[rows].view(target.shape)
    if source.data_ptr() != target.data_ptr():
        target.copy_(source)
