"""State dicts of sharded modules: under the module's own names, and under a checkpoint's.

A *form* maps the keys of a state dict to the places that have their values. There are two:

- `module_form`: keys are the names in this rank's module tree.
- `checkpoint_form`: keys are the global names (`names.py`), the same for every way to split the
  model.
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

from ..core.dtensor.blocks import Chunks
from ..core.dtensor.parts import part_of
from ..core.dtensor.uneven import chunks_of, even_chunks, is_replicated, own_chunks
from ..core.layout.ranges import Shape
from .names import EXTRA_STATE, FP8_SCALING, GlobalNames, split_depth


@dataclass(frozen=True)
class Place:
    """The place of a key's value: piece `number` of `count` equal pieces, along dimension 0, of the
    value that the module itself has under `name`."""

    name: str
    number: int = 0
    count: int = 1


Form = Mapping[str, Place]
ModuleParams = Mapping[str, nn.Parameter]


def module_form(own: Iterable[str]) -> Form:
    """The form whose keys are the module's `own`."""
    return {name: Place(name) for name in own}


def checkpoint_form(own: Iterable[str], names: GlobalNames) -> Form:
    """The form whose keys are those of a checkpoint, for the module's `own` keys. Without keys of
    `EXTRA_STATE`."""
    form = {}
    for name in own:
        if not name.endswith(EXTRA_STATE):
            count = len(names.suffixes(name))
            for number, key in enumerate(names.keys(name)):
                form[key] = Place(name, number, count)
    return form


def tree_names(module: nn.Module, own: Iterable[str]) -> dict[str, str]:
    """Key of the module's own state dict -> the name by which torch's load finds it. The two differ
    below a Float16Module, which is a level in the tree of modules but not in keys."""
    names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    names += [name for name, _ in module.named_buffers(remove_duplicate=False)]
    names += [f"{name}.{EXTRA_STATE}" for name, _ in module.named_modules(remove_duplicate=False)]
    places = {split_depth(name)[1]: name for name in names}
    own_places = {key: split_depth(key)[1] for key in own}
    return {key: places[local] for key, local in own_places.items() if local in places}


def chosen_form(forms: Sequence[Form], given: Iterable[str]) -> tuple[Form, dict[str, str]]:
    """The form that the `given` keys are of, and the form's key for each given one.

    A key may have one "module." more or less than the form's: some callers strip or add one. The
    chosen form is the one with the fewest unknown keys, and among these the fewest missing ones.
    Raises ValueError if two fit equally well and do not mean the same.
    """
    candidates = [(form, {key: _form_key(key, form) for key in given}) for form in forms]
    candidates.sort(key=_misfit)
    best, keys = candidates[0]
    for other in candidates[1:]:
        form, other_keys = other
        means_the_same = all(form.get(other_keys[key]) == best.get(keys[key]) for key in keys)
        if not means_the_same and _misfit(other) == _misfit(candidates[0]):
            raise ValueError(
                "load_state_dict: the keys fit both names of this rank's modules and global names "
                "of a checkpoint. Give all keys of one of them"
            )
    return best, keys


def _misfit(candidate: tuple[Form, dict[str, str]]) -> tuple[int, int]:
    """The number of given keys that the form does not have, and the number of the form's keys that
    are not given."""
    form, keys = candidate
    known = {key for key in keys.values() if key in form}
    return len(keys) - len(known), len(form) - len(known)


def _form_key(key: str, form: Form) -> str:
    for candidate in (key, f"module.{key}", key.removeprefix("module.")):
        if candidate in form:
            return candidate
    return key


def values_of(form: Form, params: ModuleParams, plain: Mapping[str, Any]) -> dict:
    """The form's state dict. Its DTensors carry their chunks.

    params: sharded parameters by the module's keys; plain: the module's own state dict."""
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
    """One line for each mis-shaped value and, if `strict`, for each missing or unexpected one."""
    found = []
    if strict:
        expected = _required(form)
        given = _required(values)
        found += [f"missing: {key}" for key in sorted(expected - given)]
        found += [f"unexpected: {key}" for key in sorted(given - expected)]
    for key, value in values.items():
        place = form.get(key)
        if place is not None and place.name in params:
            found += shape_problems(key, params[place.name], place, value)
    return found


def _required(keys: Iterable[str]) -> set[str]:
    """The keys without those that a load does not require."""
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
    """The shapes that `value` may have: for a DTensor that of the whole tensor, for a plain tensor
    that of the module's parameter, which tensor parallelism may have split."""
    ref = param.fsdp_layout_ref  # type: ignore[attr-defined]
    shape = tuple(param.shape) if isinstance(value, DTensor) else ref.shape
    shape = (shape[0] // place.count, *shape[1:])
    own = ref.layout.specs[ref.index].shape
    # A parameter of shape () is laid out with shape (1,); a value may have either.
    return [shape] if own else [own, shape]


def incompatible_keys(form: Form, given: Mapping[str, str], result: Any) -> Any:
    """The missing and unexpected keys of a load, in the form's keys.

    given: the form's key for each given one. result: what torch returned for its load, in the
    module's keys.
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
    """Writes values of sharded parameters into this rank's rows; returns, by the module's keys,
    what torch's own load gets: all other values of the form, and for each parameter that was
    written in all of its pieces the parameter itself, so that torch does not report it as missing.

    Shapes must have been checked (`load_problems`). Collective if one of the values is a DTensor
    that is not known to be cut like its place. Raises ValueError, on all ranks and before anything
    is written, for a DTensor whose rows are unknown.
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

    target: a DTensor over this rank's rows of the place; elements: the same rows, as a slice of a
    flat plain tensor of the whole place.
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
    """Loads what `state` has for the sharded parameters that `module` itself holds; returns the
    problems of values of a wrong shape, which are not written.

    In `state` each of these values is replaced by its parameter: torch's own load then copies the
    parameter onto itself. Collective and with errors as `copy_values`."""
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
    """Copies this rank's rows of the value of each piece into it. Shapes must have been checked.
    Collective and with errors as `copy_values`."""
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
"""The cut of a DTensor into rows: that of its place, another one, or an unknown one. The larger
number is the worse one."""


def _fits(targets: Mapping[str, DTensor], values: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Key -> the worst cut on any rank, for each sharded DTensor that is not known to be cut like
    its target on all ranks.

    All ranks have to do the same with a DTensor: one that gathers waits for all, and none may write
    if another raises. Hence one all-reduce for each mesh that has such DTensors. Every rank knows
    by itself which these are."""
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
    # The cut of `value` on this rank, compared with the chunks `own` of its target.
    given = chunks_of(value)
    if given is None:
        if not set(map(type, value._spec.placements)) <= {Shard, Replicate}:
            return OTHER  # strided shards and partial sums, which `full_tensor` makes whole
        given = even_chunks(value)
    if given is None:
        return UNKNOWN
    return SAME if given.boxes == own.boxes else OTHER


def _write(piece: Piece, value: torch.Tensor, fit: int) -> None:
    target, elements = piece
    local = target._local_tensor
    if not isinstance(value, DTensor):
        flat = value.detach().reshape(-1)
        local.copy_(flat[elements].view(local.shape))
        return
    given = value._local_tensor
    if is_replicated(value) or fit == OTHER:
        whole = given if is_replicated(value) else value.full_tensor()
        own_chunks(target).take_from(whole.view(target.shape), local)
    elif given.data_ptr() != local.data_ptr():  # else it is the same memory
        local.copy_(given)
