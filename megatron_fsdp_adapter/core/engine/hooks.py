"""The hooks by which autograd and `nn.Module` call the engine. Hooks only pass calls on: to the
engine, and to its filter of saved tensors.

Hooks hold the engine weakly: modules do not keep it alive, so that deleting the wrapper frees
every buffer without waiting for the cycle collector.

The end of a unit's backward is caught on its *inputs*: each input that needs a gradient is
replaced by a view of itself, whose backward node runs after all of the unit's gradients have been
accumulated (autograd runs accumulation first) and before the unit in front of it is touched.
Counting post-accumulate hooks was rejected: a Python call for every parameter, and a count that
never completes when one gets no gradient.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import types
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge, register_multi_grad_hook
from torch.distributed._composable.contract import _get_registry
from torch.utils._pytree import tree_leaves

from . import transforms
from .grad_callbacks import grad_callback
from .group import ParamGroup
from .partition import ROOT, unchecked
from .unit import Unit

_PLAIN = frozenset({type(None), bool, int, float, str})
_LEAVES = (torch.Tensor, type(None), bool, int, float, str)
"""Types that certainly hold no tensors besides themselves."""

_OPAQUE = (
    *_LEAVES, bytes, type, enum.Enum, torch.dtype, torch.device, torch.Size, nn.Module,
    types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType,
)  # fmt: skip
"""Types that are not searched for tensors."""


EngineRef = Callable[[], Any]
"""A weak reference to an `FsdpEngine`, whose module imports this one."""


def in_backward() -> bool:
    """True if this thread is inside an autograd backward; true while recomputing activations."""
    return torch._C._current_graph_task_id() != -1


def needs_grad(value: Any) -> bool:
    if not isinstance(value, torch.Tensor):
        return False
    return value.requires_grad or (not transforms.are_plain() and bool(transforms.reached(value)))


def accumulates(groups: Iterable[ParamGroup]) -> bool:
    """True if the running backward accumulates gradients of any of `groups`.

    A backward for gradients of inputs alone (`torch.autograd.grad`, `backward(inputs=...)`) does
    not. A backward without chosen tensors always does: then no parameter is looked at.
    """
    if transforms.is_inside():
        return False  # a transform's own backward, for gradients of what it was given
    # Torch's checkpoint asks this too. It is true where no tensors were chosen.
    if torch.autograd._is_checkpoint_valid() and not _is_on_chosen_tensor():
        return True
    with unchecked(), torch.enable_grad():
        for group in groups:
            if group.key.requires_grad:
                for param in group.in_modules:
                    if param.requires_grad and _accumulates(param):
                        return True
    return False


def _is_on_chosen_tensor() -> bool:
    """True if the running hook is on a chosen tensor with nothing chosen behind it.

    Torch calls such a hook before it reports that tensors were chosen."""
    node = torch._C._current_autograd_node()
    behind = [edge[0] for edge in node.next_functions if edge[0] is not None]
    return not any(torch._C._will_engine_execute_node(one) for one in behind)


def _accumulates(param: nn.Parameter) -> bool:
    # True if the running backward, which is limited to chosen tensors (`torch.autograd.grad`,
    # `backward(inputs=...)`), accumulates into `param`.
    try:
        return bool(torch._C._will_engine_execute_node(get_gradient_edge(param).node))
    except RuntimeError as error:
        # Torch does not answer for a parameter that `torch.autograd.grad` was asked for. Its
        # gradient is returned, not accumulated.
        if "currently running autograd.grad()" not in str(error):
            raise
        return False


def on_inputs_done(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    callback: Callable[..., None],
    on_double_backward: Callable[..., None] = lambda: None,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The inputs to use instead; calls `callback` in backward when the gradients of all are known.

    * A tensor that needs a gradient is replaced by a view of itself, also inside of tuples.
    * Lists, dicts and dataclasses stay the same objects, since a module may write into them. Views
      take the places of their tensors while the module runs (`put_back`). A hook on a tensor that
      stays in a list, as an auxiliary loss of an earlier unit does, would run in the backward of
      that unit.
    * Tensors in other containers are watched themselves. The gradient of one is known when all its
      uses are.
    * A parameter is not watched: its gradient is accumulated only after a hook on it has run.
    * An object that is no dataclass is not searched. It may be a cache of what other units, or
      another call of this one, have computed. Those gradients are known too late or too early.
    * `callback` is never called if nothing is watched, or if a watched tensor is a leaf. The unit
      is then completed when backward ends (`FsdpEngine.end_backward`).

    on_double_backward: called when a backward through that backward needs the gradients of inputs.
    """
    watched: list[torch.Tensor] = []
    # Most of what layers are given by name is None or a plain value.
    new_args = tuple([v if type(v) in _PLAIN else _watch(v, watched) for v in args])
    new_kwargs = {k: v if type(v) in _PLAIN else _watch(v, watched) for k, v in kwargs.items()}
    if not watched:
        return args, kwargs
    if any(value.grad_fn is None for value in watched):
        # Only another container can give a leaf: other inputs became views. A hook on a leaf stays
        # for life, so later passes would call it too.
        return new_args, new_kwargs

    def done(grads: Any) -> None:
        if torch.is_grad_enabled():
            on_outputs_needed(grads, on_double_backward)
        callback()

    if len(watched) == 1:
        watched[0].register_hook(done)
    else:
        register_multi_grad_hook(watched, done, mode="all")
    return new_args, new_kwargs


def _watch(value: Any, watched: list[torch.Tensor], around: tuple[int, ...] = ()) -> Any:
    """The value that a module gets in place of its input `value`. Appends to `watched` the tensors
    whose gradients are waited for. around: ids of the containers that `value` is in."""
    # Tensors and plain values come first: most layers are given nothing else, and the search at the
    # end takes longer than all the rest.
    if isinstance(value, torch.Tensor):
        if isinstance(value, nn.Parameter) or not needs_grad(value):
            return value
        view = value.view_as(value)
        if around:
            view._fsdp_input = value  # type: ignore[attr-defined]
        watched += [view] if transforms.are_plain() else transforms.reached(view)
        return view
    if isinstance(value, _LEAVES):
        return value
    if type(value) is tuple or (isinstance(value, tuple) and hasattr(value, "_fields")):
        items = [_watch(item, watched, around) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return tuple(items) if type(value) is tuple else type(value)(*items)
    if isinstance(value, (list, dict)) or _is_dataclass_instance(value):
        if id(value) not in around:
            _watch_items(value, watched, around)
        return value
    for found in _tensors_in(value, _is_dataclass_instance):
        if needs_grad(found) and not isinstance(found, nn.Parameter):
            watched.append(found)
    return value


def _watch_items(value: Any, watched: list[torch.Tensor], around: tuple[int, ...]) -> None:
    """Puts views in the places of tensors in a list, a dict or a dataclass, at any depth."""
    _replace_items(value, lambda item: _watch(item, watched, (*around, id(value))))


def _replace_items(value: Any, other: Callable[[Any], Any]) -> None:
    """Puts `other` of each item of a list, a dict or a dataclass in its place."""
    if isinstance(value, (list, dict)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        put: Callable[..., None] = value.__setitem__
    else:
        items = _attributes(value).items()
        put = functools.partial(object.__setattr__, value)  # of a frozen dataclass, too
    for key, item in list(items):
        new = other(item)
        if new is not item:
            put(key, new)


def put_back(given: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
    """Puts tensors back in the places of their views in containers among the arguments `given`: a
    program may have asked for their gradients, or for those of a list that it goes on using."""
    args, kwargs = given
    for value in (*args, *kwargs.values()):
        if isinstance(value, (list, dict)) or _is_dataclass_instance(value):
            _own(value, ())


def _own(value: Any, around: tuple[int, ...]) -> Any:
    """The value that `_watch` was given where it gave `value`. around: as of `_watch`."""
    if isinstance(value, torch.Tensor):
        return getattr(value, "_fsdp_input", value)
    if isinstance(value, _LEAVES):
        return value
    inside = (*around, id(value))
    if isinstance(value, tuple):
        items = [_own(item, inside) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    is_container = isinstance(value, (list, dict)) or _is_dataclass_instance(value)
    if is_container and id(value) not in around:
        _replace_items(value, lambda item: _own(item, inside))
    return value


def _added(given: tuple[tuple[Any, ...], dict[str, Any]]) -> list[torch.Tensor]:
    """The tensors that a module has put into containers among the arguments `given`: into a list of
    auxiliary losses, for example."""
    args, kwargs = given
    found = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, (list, dict)) or _is_dataclass_instance(value):
            for tensor in _tensors_in(value, _is_dataclass_instance):
                if not hasattr(tensor, "_fsdp_input"):
                    found.append(tensor)
    return found


def on_outputs_needed(output: Any, callback: Callable[..., None], given: Any = ()) -> None:
    """Calls `callback` in backward when the first gradient of an output arrives.

    A view that is changed in place leaves the graph. The gradient then arrives at the tensor that
    it is a view of. That tensor is watched too, unless the inputs `given` share it. What the module
    has put into containers among its inputs `given` is an output, too.
    """
    tensors = []
    bases = []
    added = _added(given) if given else []
    given_out = [*_tensors_in(output), *added]
    if not transforms.are_plain():
        given_out = [one for tensor in given_out for one in transforms.reached(tensor)]
    for tensor in given_out:
        if tensor.grad_fn is None:
            continue
        tensors.append(tensor)
        base = tensor._base
        if base is not None and base.grad_fn is not None:
            bases.append(base)
    if bases:
        of_inputs = {id(v if v._base is None else v._base) for v in _tensors_in(given)}
        tensors += [base for base in bases if id(base) not in of_inputs]

    def first(grad: Any) -> None:
        if torch.is_grad_enabled():  # with `create_graph`
            _on_derivative(grad, callback)
        callback(grad)

    if len(tensors) == 1:
        tensors[0].register_hook(first)
    elif tensors:
        register_multi_grad_hook(tensors, first, mode="any")
    for tensor in tensors:
        if len(tensor._backward_hooks) > 1:  # type: ignore[arg-type]
            _put_last_first(tensor._backward_hooks)


def _on_derivative(grad: torch.Tensor, callback: Callable[..., None]) -> None:
    """Calls `callback` in a backward through the derivative by `grad`, a gradient of an output, if
    another backward has computed that with `create_graph`. It reads weights, as the output does."""

    def found(derivative: torch.Tensor) -> None:
        if torch.is_grad_enabled():
            on_outputs_needed(derivative, callback)

    if grad.requires_grad:
        grad.register_hook(found)


def _put_last_first(found: Any) -> None:
    """Makes the hook of a tensor that was registered last run first: a unit inside has returned the
    tensor too. The outer unit's backward begins first then, as it does where the outer unit goes on
    computing, perhaps on another rank."""
    key, hook = found.popitem()
    others = dict(found)
    found.clear()  # torch runs hooks in the order of insertion
    found[key] = hook
    found.update(others)


def has_grad_output(output: Any) -> bool:
    return any(needs_grad(value) for value in _tensors_in(output))


def _tensors_in(
    value: Any, searches: Callable[[Any], bool] = lambda leaf: True
) -> list[torch.Tensor]:
    """The tensors in what a module was given or returned.

    Containers that pytree knows are searched, and so are attributes of objects that `searches`
    accepts, except those of `_OPAQUE` types. A tensor, or a tuple of tensors and plain values, is
    the usual case, which needs no search.
    """
    if isinstance(value, torch.Tensor):
        return [value]
    if type(value) is tuple:
        tensors = [item for item in value if type(item) not in _PLAIN]
        if all(isinstance(item, torch.Tensor) for item in tensors):
            return tensors
    found = []
    seen = set()
    pending = [value]
    while pending:
        for leaf in tree_leaves(pending.pop()):
            if isinstance(leaf, torch.Tensor):
                found.append(leaf)
            elif not isinstance(leaf, _OPAQUE) and id(leaf) not in seen and searches(leaf):
                seen.add(id(leaf))
                pending.append(list(_attributes(leaf).values()))
    return found


def _attributes(value: Any) -> dict[str, Any]:
    """The attributes of an object, those of a dataclass with slots included."""
    attributes = dict(getattr(value, "__dict__", {}))
    if _is_dataclass_instance(value):
        for field in dataclasses.fields(value):
            attributes.setdefault(field.name, getattr(value, field.name, None))
    return attributes


def _is_dataclass_instance(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _unit_pre_forward(
    engine: EngineRef, ordinal: int, module: nn.Module, args: Any, kwargs: Any
) -> Any:
    alive = engine()
    if alive is None or alive.calls_parts:
        return None
    unit = alive.units[ordinal]
    given = alive.pre_forward(unit, args, kwargs)
    if alive.saved.enter(ordinal):
        unit.saves_through_hooks()
    return given


def _unit_post_forward(
    engine: EngineRef,
    ordinal: int,
    ends: bool,
    module: nn.Module,
    args: Any,
    kwargs: Any,
    out: Any,
) -> None:
    alive = engine()
    if alive is not None and not alive.calls_parts:
        alive.post_forward(alive.units[ordinal], out, (args, kwargs), ends)


def _root_pre_forward(
    engine: EngineRef, name: str, module: nn.Module, args: Any, kwargs: Any
) -> Any:
    alive = engine()
    if alive is None or alive.calls_parts:
        return None
    alive.root_pre_forward(name)
    if alive.saved.enter(name):
        alive.units[-1].saves_through_hooks()
    if in_backward() or not torch.is_grad_enabled():
        return None
    # A backward through gradients of the model's inputs may begin with weights of the root's.
    on_double_backward = grad_callback(alive.pre_backward, alive.units[-1])
    return on_inputs_done(args, kwargs, lambda: None, on_double_backward)


def _root_post_forward(
    engine: EngineRef, name: str, module: nn.Module, args: Any, kwargs: Any, out: Any
) -> None:
    alive = engine()
    if alive is not None and not alive.calls_parts:
        alive.root_post_forward(name, out)
        if torch.is_grad_enabled() and not in_backward():
            put_back((args, kwargs))


def _enter(engine: EngineRef, key: str, module: nn.Module, args: Any) -> None:
    alive = engine()
    if alive is not None and alive.saved.enter(key):
        alive.units[-1].saves_through_hooks()


def _leave(engine: EngineRef, key: Any, module: nn.Module, args: Any, out: Any) -> None:
    alive = engine()
    if alive is not None:
        alive.saved.leave(key)
        if alive.step.running == key:  # its own hook behind forward has not run
            alive.step.forward_raised()


def register(engine: Any, module: nn.Module, of_units: Sequence[Sequence[nn.Module]]) -> None:
    """Registers all hooks of an engine:

    * on the modules `of_units`, in the order of the engine's units;
    * on the modules in `module`, itself included, that hold all parameters. Their calls begin a
      forward pass;
    * on other modules that hold parameters of the root, and on checkpointed ones.
    """
    for unit, modules in zip(engine.units, of_units, strict=True):
        for own in modules:
            register_unit(engine, unit, own, ends=own is modules[-1])
    everything = _ids_of(engine.groups)
    of_root = _ids_of(engine.root.groups)
    for name, child in module.named_modules():
        if everything <= set(map(id, child.parameters())):
            register_root(engine, name or ROOT, child)
        elif not of_root.isdisjoint(map(id, child.parameters(recurse=False))):
            register_owner(engine, name, child)
        if "checkpoint" in (_get_registry(child) or ()):
            # Its hook puts others on what is saved, behind ours in forward, and before ours when it
            # calls the module again: both times ours come last.
            register_owner(engine, f"{name}, checkpointed", child, first=False)


def _ids_of(groups: Iterable[ParamGroup]) -> set[int]:
    return {id(param) for group in groups for param in group.in_modules}


def register_unit(engine: Any, unit: Unit, module: nn.Module, ends: bool) -> None:
    """Hooks the calls of a unit's module. ends: it is the unit's last module.

    Our hook before forward runs first, and ours after it last. Both hold the unit's number and not
    the unit: some modules of Megatron are in reference cycles and outlive the model."""
    ref = weakref.ref(engine)
    module.register_forward_pre_hook(
        _untraced(_unit_pre_forward, ref, unit.ordinal), prepend=True, with_kwargs=True
    )
    module.register_forward_hook(
        _untraced(_unit_post_forward, ref, unit.ordinal, ends), with_kwargs=True
    )
    _register_leave(module, ref, unit.ordinal)


def register_root(engine: Any, name: str, module: nn.Module) -> None:
    """Hooks the calls of a module that holds all parameters: a forward pass starts there."""
    ref = weakref.ref(engine)
    before = _untraced(_root_pre_forward, ref, name)
    module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
    module.register_forward_hook(_untraced(_root_post_forward, ref, name), with_kwargs=True)
    _register_leave(module, ref, name)


def register_owner(engine: Any, key: str, module: nn.Module, first: bool = True) -> None:
    """Hooks the calls of a module that holds weights of the root's, or is checkpointed.

    Between the model's call and its own, other hooks on saved tensors may have been set. first:
    ours runs before other hooks of the module."""
    ref = weakref.ref(engine)
    module.register_forward_pre_hook(_untraced(_enter, ref, key), prepend=first)
    _register_leave(module, ref, key)


def _register_leave(module: nn.Module, ref: EngineRef, key: Any) -> None:
    module.register_forward_hook(_untraced(_leave, ref, key), always_call=True)


def _untraced(function: Callable[..., Any], *args: Any) -> Callable[..., Any]:
    """A hook that torch.compile leaves out of the graphs of a module that it compiles."""
    return torch.compiler.disable(functools.partial(function, *args))  # type: ignore[no-any-return]
