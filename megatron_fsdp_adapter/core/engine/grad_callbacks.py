"""Hooks on tensors, and on the end of a backward, that call methods of an engine.

They hold it weakly: a graph of autograd's may outlive the model, and Python's garbage collector
does not look into graphs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from .unit import Phase, Unit


def grad_callback(method: Callable[..., None], *units: Unit) -> Callable[..., None]:
    """A tensor hook that calls the bound engine `method` with `units`, and leaves the gradient
    alone. It raises RuntimeError if the engine is gone and they need it."""
    engine = weakref.ref(method.__self__)  # type: ignore[attr-defined]
    function = method.__func__  # type: ignore[attr-defined]

    def callback(*unused_grads: Any) -> None:
        alive = engine()
        if alive is None:
            _refuse_without_engine(units)
        else:
            function(alive, *units)

    return callback


def _refuse_without_engine(units: Iterable[Unit]) -> None:
    """RuntimeError if a backward of `units` reads weights that are not there, or trains any."""
    for unit in units:
        is_trained = any(not group.grads.is_idle for group in unit.trainable_groups)
        if unit.phase is not Phase.READY or is_trained:
            raise RuntimeError(
                f"unit {unit.name}: its model was deleted before the backward, which would gather "
                "its weights and reduce its gradients. Keep the model until then"
            )


def at_end_of_backward(method: Callable[[], None]) -> weakref.ref[Any]:
    """Calls the bound engine `method` when the running backward has finished. The result refers to
    nothing once that backward is over, also if it has raised."""
    callback = grad_callback(method)
    torch.autograd.Variable._execution_engine.queue_callback(callback)  # type: ignore[attr-defined]
    return weakref.ref(callback)
