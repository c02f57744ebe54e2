"""Where autograd and `nn.Module` call the engine. Every hook is one call of an engine method.

Hooks hold the engine weakly: modules do not keep it alive, so that deleting the wrapper frees
every buffer without waiting for the cycle collector.

The end of a unit's backward is caught on its *inputs*: each input that needs a gradient is
replaced by a view of itself, whose backward node runs after all of the unit's gradients have been
accumulated (autograd runs accumulation first) and before the unit in front of it is touched.
Counting post-accumulate hooks was rejected: a Python call for every parameter, and a count that
never completes when one gets no gradient.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_flatten, tree_unflatten

from .unit import Unit

if TYPE_CHECKING:
    from .engine import FsdpEngine

_LEAVES = (torch.Tensor, type(None), bool, int, float, str)
"""What certainly holds no tensors besides itself."""

EngineRef = Callable[[], "FsdpEngine | None"]


def in_backward() -> bool:
    """Whether this thread is inside an autograd backward; true while recomputing activations."""
    return torch._C._current_graph_task_id() != -1


def needs_grad(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def on_inputs_done(
    args: tuple[Any, ...], kwargs: dict[str, Any], callback: Callable[..., None]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Calls `callback` in backward when the gradients of all inputs are known.

    Returns the inputs to use instead. Without an input that needs a gradient nothing is caught. A
    parameter among them is left: its gradient is accumulated only after a hook on it has run.
    """
    # Most layers are given tensors and plain values; a walk through a tree of them takes longer
    # than all else here.
    nested = not all(isinstance(value, _LEAVES) for value in (*args, *kwargs.values()))
    if nested:
        flat, tree = tree_flatten((args, kwargs))
    else:
        flat = [*args, *kwargs.values()]
    watched = [
        index
        for index, value in enumerate(flat)
        if needs_grad(value) and not isinstance(value, nn.Parameter)
    ]
    if not watched:
        return args, kwargs
    for index in watched:
        flat[index] = flat[index].view_as(flat[index])
    if len(watched) == 1:
        flat[watched[0]].register_hook(callback)
    else:
        register_multi_grad_hook([flat[index] for index in watched], callback, mode="all")
    if nested:
        return tree_unflatten(flat, tree)
    return tuple(flat[: len(args)]), dict(zip(kwargs, flat[len(args) :], strict=True))


def on_outputs_needed(output: Any, callback: Callable[..., None]) -> None:
    """Calls `callback` in backward when the first gradient of an output arrives."""
    tensors = [value for value in _leaves_of(output) if needs_grad(value)]
    if len(tensors) == 1:
        tensors[0].register_hook(callback)
    elif tensors:
        register_multi_grad_hook(tensors, callback, mode="any")


def has_grad_output(output: Any) -> bool:
    return any(needs_grad(value) for value in _leaves_of(output))


def _leaves_of(output: Any) -> list[Any]:
    """What a module returned, flat: mostly a tensor, or a tuple of tensors and plain values."""
    if isinstance(output, _LEAVES):
        return [output]
    if type(output) is tuple and all(isinstance(value, _LEAVES) for value in output):
        return list(output)
    return tree_flatten(output)[0]


def _unit_pre_forward(
    engine: EngineRef, ordinal: int, module: nn.Module, args: Any, kwargs: Any
) -> Any:
    alive = engine()
    return None if alive is None else alive.pre_forward(alive.units[ordinal], args, kwargs)


def _unit_post_forward(
    engine: EngineRef, ordinal: int, module: nn.Module, args: Any, out: Any
) -> None:
    alive = engine()
    if alive is not None:
        alive.post_forward(alive.units[ordinal], out)


def _root_pre_forward(engine: EngineRef, name: str, module: nn.Module, args: Any) -> None:
    alive = engine()
    if alive is not None:
        alive.root_pre_forward(name)


def _root_post_forward(
    engine: EngineRef, name: str, module: nn.Module, args: Any, out: Any
) -> None:
    alive = engine()
    if alive is not None:
        alive.root_post_forward(name, out)


def grad_callback(method: Callable[..., None], *args: Any) -> Callable[..., None]:
    """A tensor hook that calls the bound engine `method` and leaves the gradient alone."""
    engine, function = weakref.ref(method.__self__), method.__func__  # type: ignore[attr-defined]

    def callback(*unused_grads: Any) -> None:
        alive = engine()
        if alive is not None:
            function(alive, *args)

    return callback


def register_unit(engine: FsdpEngine, unit: Unit, module: nn.Module) -> None:
    """Hooks the calls of a unit's module; ours run first before and last after forward. They hold
    the unit's number: some modules of Megatron are in reference cycles and outlive the model."""
    ref = weakref.ref(engine)
    module.register_forward_pre_hook(
        functools.partial(_unit_pre_forward, ref, unit.ordinal), prepend=True, with_kwargs=True
    )
    module.register_forward_hook(functools.partial(_unit_post_forward, ref, unit.ordinal))


def register_root(engine: FsdpEngine, name: str, module: nn.Module) -> None:
    """Hooks the calls of a module that holds all parameters: a forward pass starts there."""
    ref = weakref.ref(engine)
    module.register_forward_pre_hook(functools.partial(_root_pre_forward, ref, name), prepend=True)
    module.register_forward_hook(functools.partial(_root_post_forward, ref, name))


def at_end_of_backward(method: Callable[[], None]) -> None:
    """Calls the bound engine `method` when the running backward has finished."""
    torch.autograd.Variable._execution_engine.queue_callback(grad_callback(method))  # type: ignore[attr-defined]
