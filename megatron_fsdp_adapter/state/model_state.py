"""State dicts of sharded modules: under the module's own names, and under a checkpoint's.

A state dict is one of two *forms*: a map from keys to the places whose values they are. The keys
of one are the names in this rank's module tree, those of the other what `checkpoint.names` makes
of them, the same for every way to split the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from ..core.dtensor.parts import part_of
from ..core.dtensor.uneven import Chunks, chunks_of, even_chunks, is_replicated, own_chunks
from ..core.layout.ranges import Shape
from .names import EXTRA_STATE, FP8_SCALING, GlobalNames, split_depth


@dataclass(frozen=True)
class Place:
    """The place of a key of a state dict: piece `number` of `count` of the value that the module
    itself has under `name`."""

    name: str
    number: int = 0
    count: int = 1


Form = Mapping[str, Place]
ModuleParams = Mapping[str, nn.Parameter]


def module_form(own: Iterable[str]) -> Form:
    """Keys as the module has them."""
    return {name: Place(name) for name in own}


def checkpoint_form(own: Iterable[str], names: GlobalNames) -> Form:
    """Keys as in a checkpoint, without `EXTRA_STATE`."""
    form = {}
    for name in own:
        if not name.endswith(EXTRA_STATE):
            count = len(names.suffixes(name))
            for number, key in enumerate(names.keys(name)):
                form[key] = Place(name, number, count)
    return form


def tree_names(module: nn.Module, own: Iterable[str]) -> dict[str, str]:
    """Key of a module's own state dict -> the name by which torch's load finds it: a Float16Module
    is a level in the tree of modules, and none in keys."""
    names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    names += [name for name, _ in module.named_buffers(remove_duplicate=False)]
    names += [f"{name}.{EXTRA_STATE}" for name, _ in module.named_modules(remove_duplicate=False)]
    places = {split_depth(name)[1]: name for name in names}
    own_places = {key: split_depth(key)[1] for key in own}
    return {key: places[local] for key, local in own_places.items() if local in places}


def chosen_form(forms: Sequence[Form], given: Iterable[str]) -> tuple[Form, dict[str, str]]:
    """The form that the `given` keys are of, and the form's key for each given one.

    A key may have one "module." more or less than the form's: some callers strip or add one. The
    form with the fewest unknown keys, then the fewest missing ones, is the one that is meant.
    Raises ValueError if two fit equally well and do not mean the same.
    """
    found = [(form, {key: _own_key(key, form) for key in given}) for form in forms]
    found.sort(key=_misfit)
    best, keys = found[0]
    for other in found[1:]:
        form, other_keys = other
        means_the_same = all(form.get(other_keys[key]) == best.get(keys[key]) for key in keys)
        if not means_the_same and _misfit(other) == _misfit(found[0]):
            raise ValueError(
                "load_state_dict: the keys fit both names of this rank's modules and global names "
                "of a checkpoint. Give all keys of one of them"
            )
    return best, keys


def _misfit(candidate: tuple[Form, dict[str, str]]) -> tuple[int, int]:
    """The number of keys that the form does not have, and of its own that are missing."""
    form, keys = candidate
    known = {key for key in keys.values() if key in form}
    return len(keys) - len(known), len(form) - len(known)


def _own_key(key: str, form: Form) -> str:
    for candidate in (key, f"module.{key}", key.removeprefix("module.")):
        if candidate in form:
            return candidate
    return key


def values_of(form: Form, params: ModuleParams, plain: Mapping[str, Any]) -> dict:
    """The form's state dict. params: sharded parameters by the module's keys; plain: the
    module's own state dict, which has the other values. DTensors know their chunks."""
    state = {}
    for key, place in form.items():
        value = plain[place.name]
        param = params.get(place.name)
        if param is not None:
            ref = param.fsdp_layout_ref  # type: ignore[attr-defined]
            value = part_of(value, ref, place.number, place.count)
        state[key] = value
    return state


def load_problems(
    form: Form, params: ModuleParams, values: Mapping[str, Any], strict: bool
) -> list[str]:
    """One line for each missing, unexpected (if `strict`) and mis-shaped value."""
    found = []
    if strict:
        expected = _of_weights(form)
        given = _of_weights(values)
        found += [f"missing: {key}" for key in sorted(expected - given)]
        found += [f"unexpected: {key}" for key in sorted(given - expected)]
    for key, value in values.items():
        place = form.get(key)
        if place is not None and place.name in params:
            found += shape_problems(key, params[place.name], place, value)
    return found


def _of_weights(keys: Iterable[str]) -> set[str]:
    """The keys that a load asks for."""
    return {key for key in keys if not key.endswith((EXTRA_STATE, FP8_SCALING))}


def shape_problems(key: str, param: nn.Parameter, place: Place, value: Any) -> list[str]:
    """Problems of `value` for `place` in the sharded parameter `param`."""
    if not isinstance(value, torch.Tensor):
        return [f"{key}: a {type(value).__name__}, expected a tensor"]
    shape = tuple(value.shape)
    expected = _shapes_for(param, place, value)
    if shape in expected:
        return []
    shapes = " or ".join(map(str, expected))
    return [f"{key}: shape {shape}, expected {shapes}"]


def _shapes_for(param: nn.Parameter, place: Place, value: torch.Tensor) -> list[Shape]:
    """The shapes that `value` may have: for a DTensor the whole tensor's, for a plain one that of
    the module's parameter, which tensor parallelism may have split."""
    ref = param.fsdp_layout_ref  # type: ignore[attr-defined]
    shape = tuple(param.shape) if isinstance(value, DTensor) else ref.shape
    shape = (shape[0] // place.count, *shape[1:])
    own = ref.layout.specs[ref.index].shape
    return [shape] if own else [own, shape]


def incompatible_keys(form: Form, given: Mapping[str, str], result: Any) -> Any:
    """The result that torch's `load_state_dict` would return for the whole module, in the form's
    keys.

    given: the form's key for each given one. result: torch's own, of a load into the whole module
    without the values that the form does not have.
    """
    absent = set(result.missing_keys)
    present = set(given.values())
    names = {place.name for place in form.values()}
    missing = [key for key, place in form.items() if place.name in absent and key not in present]
    missing += [name for name in result.missing_keys if name not in names]
    unexpected = [key for key, own in given.items() if own not in form]
    return result._replace(
        missing_keys=missing, unexpected_keys=[*result.unexpected_keys, *unexpected]
    )


def copy_values(form: Form, params: ModuleParams, values: Mapping[str, Any]) -> dict[str, Any]:
    """Writes what is for parameters into this rank's rows; returns the rest, by module's keys, and
    with it the parameters that were written in all of their pieces, which are their own values.

    Collective if a DTensor is among the values that is not known to be cut like its place.
    ValueError, on all ranks and before anything is written, for one whose rows are unknown.
    """
    pieces = {}
    rest = {}
    written = set()
    for key, value in values.items():
        if key in form:
            place = form[key]
            param = params.get(place.name)
            if param is None:
                rest[place.name] = value
            else:
                pieces[key] = piece_of(param, param, place)
                written.add(place.name)
    write_pieces(pieces, values)
    written.difference_update(place.name for key, place in form.items() if key not in values)
    for name in written:
        rest[name] = params[name]
    return rest


class Piece(NamedTuple):
    """A place in a sharded parameter, or in a value of its geometry such as a moment.

    target: a DTensor over this rank's rows of it; elements: these in a plain tensor of the piece.
    """

    target: DTensor
    elements: slice


def piece_of(value: torch.Tensor, param: nn.Parameter, place: Place) -> Piece:
    """`place` in `value`, which is `param` or has its geometry."""
    ref = param.fsdp_layout_ref  # type: ignore[attr-defined]
    target = part_of(value, ref, place.number, place.count)  # type: ignore[arg-type]
    numel = torch.Size(ref.shape).numel() // place.count
    start = place.number * numel
    held = ref.held
    first = max(held.start - start, 0)
    last = min(max(held.stop - start, 0), numel)
    return Piece(target, slice(first, last))


def load_own(module: nn.Module, state: dict[str, Any], prefix: str) -> list[str]:
    """Writes what `state` has for the sharded parameters that `module` itself holds, and puts
    them in the values' places, so that torch's own load finds nothing left to do. Returns what is
    wrong with the others."""
    found = []
    params = {}
    for name, param in module._parameters.items():
        key = prefix + name
        if key in state and hasattr(param, "fsdp_layout_ref") and state[key] is not param:
            wrong = shape_problems(key, param, Place(key), state[key])  # type: ignore[arg-type]
            if wrong:
                found += wrong
                state[key] = param  # the error is raised later; nothing is written
            else:
                params[key] = param
    pieces = {key: piece_of(param, param, Place(key)) for key, param in params.items()}  # type: ignore[arg-type]
    write_pieces(pieces, state)
    state.update(params)
    return found


@torch.no_grad()
def write_pieces(pieces: Mapping[str, Piece], values: Mapping[str, torch.Tensor]) -> None:
    """Copies this rank's rows of every value, of the right shape, into its piece. Collective and
    with errors as `copy_values`."""
    fits = _fits({key: target for key, (target, _) in pieces.items()}, values)
    unknown = [key for key, fit in fits.items() if fit == UNKNOWN]
    if unknown:
        names = ", ".join(sorted(unknown)[:5])
        raise ValueError(
            f"load_state_dict: {names} ({len(unknown)} in all) are "
            "DTensors without chunks that are not split evenly, so their rows are unknown. Pass "
            "whole tensors, or those of a sharded model's state dict"
        )
    for key, piece in pieces.items():
        _write(piece, values[key], fits.get(key, SAME))


SAME, OTHER, UNKNOWN = range(3)
"""Cuts of a DTensor: that of its place, another one, or an unknown one."""


def _fits(targets: Mapping[str, DTensor], values: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """The worst on any rank for every sharded DTensor that is not known to be cut like its target
    on all ranks. No rank may take a value for its own rows while another waits for it in a
    collective, or writes while another refuses: hence one all-reduce for each mesh, if there is any
    such DTensor at all, which every rank knows by itself."""
    by_mesh: dict[DeviceMesh, list[str]] = {}
    for key in sorted(targets):
        value = values[key]
        if isinstance(value, DTensor) and not is_replicated(value):
            own = own_chunks(targets[key])
            given = chunks_of(value)
            if given is None or given.cut is None or given.cut != own.cut:
                by_mesh.setdefault(targets[key].device_mesh, []).append(key)
    found: dict[str, int] = {}
    for mesh, keys in by_mesh.items():
        local = [_fit_here(own_chunks(targets[key]), values[key]) for key in keys]  # type: ignore[arg-type]
        worst = torch.tensor(local, dtype=torch.int32, device=mesh.device_type)
        for axis in range(mesh.ndim):
            dist.all_reduce(worst, dist.ReduceOp.MAX, group=mesh.get_group(axis))
        found.update(zip(keys, worst.tolist(), strict=True))
    return found


def _fit_here(own: Chunks, value: DTensor) -> int:
    given = chunks_of(value)
    if given is None:
        if not set(map(type, value._spec.placements)) <= {Shard, Replicate}:
            return OTHER  # strided shards and partial sums, which torch makes whole
        given = even_chunks(value)
    if given is None:
        return UNKNOWN
    return SAME if given.boxes == own.boxes else OTHER


def _write(piece: Piece, value: torch.Tensor, fit: int) -> None:
    target, rows = piece
    local = target._local_tensor
    if not isinstance(value, DTensor):
        flat = value.detach().reshape(-1)
        local.copy_(flat[rows].view(local.shape))
        return
    given = value._local_tensor
    if is_replicated(value) or fit == OTHER:
        whole = given if is_replicated(value) else value.full_tensor()
        own_chunks(target).take_from(whole.view(target.shape), local)
    elif given.data_ptr() != local.data_ptr():
        local.copy_(given)
