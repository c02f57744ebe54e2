"""Errors about changes of a wrapped module that would detach its parameters from their buffers, or
that would have no effect."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

from ..core.engine.engine import FsdpEngine
from ..core.engine.partition import unchecked


def refuse_conversions(module: nn.Module, engine: FsdpEngine) -> None:
    """Makes `to`, `half` and the like raise in `module` and below, unless they change nothing."""
    dtypes = frozenset(pair.unsharded.dtype for pair in engine.pairs)
    for name, child in module.named_modules():
        where = f"{type(child).__name__} {name}".strip()
        child.__dict__["_apply"] = _apply_guard(child, dtypes, engine.runtime.device, where)


def _apply_guard(
    module: nn.Module, dtypes: frozenset[torch.dtype], device: torch.device, where: str
) -> Any:
    """A function in place of `nn.Module._apply` of `module`, which is wrapped.

    It raises RuntimeError for a conversion that would detach parameters from the flat buffers. A
    conversion that would leave every parameter as it is reaches only the module's buffers."""
    ref = weakref.ref(module)

    def apply(fn: Any, *_: Any, **__: Any) -> nn.Module | None:
        # A probe of each dtype of the parameters shows what `fn` would do to them.
        for dtype in dtypes:
            given = torch.zeros(1, dtype=dtype, device=device)
            probe = fn(given)
            if probe.dtype != dtype or probe.device != device:
                raise RuntimeError(
                    f"{where}: converting a wrapped module from {dtype} on {device} to "
                    f"{probe.dtype} on {probe.device} would detach its parameters from their "
                    "flat buffers. Convert the module before wrapping it"
                )
            if probe.data_ptr() != given.data_ptr():
                raise RuntimeError(
                    f"{where}: new memory for the parameters of a wrapped module (to_empty, a "
                    "copy) would detach them from their flat buffers. Convert the module before "
                    "wrapping it, and write values in place after"
                )
        alive = ref()
        if alive is None:
            return None
        for child in alive.modules():
            for name, value in child._buffers.items():
                if value is not None:
                    child._buffers[name] = fn(value)
        return alive

    return apply


def check_trained(engine: FsdpEngine) -> None:
    """Raises RuntimeError if `requires_grad` was changed after wrapping, or if a sharded parameter
    has a gradient hook.

    The gradients that are reduced, and their buffers, are chosen once. A later change of
    `requires_grad` would be ignored in silence, or leave the optimizer with gradients of zero. No
    backward accumulates the gradient of a sharded parameter, so its hooks would never run."""
    hooked = []
    for pair in engine.trained:
        param: Any = pair.sharded
        if param._backward_hooks or param._post_accumulate_grad_hooks:
            hooked.append(pair.managed.fqns[0])
    if hooked:
        names = ", ".join(hooked[:5])
        raise RuntimeError(
            f"gradient hooks on {names} ({len(hooked)} parameters in all) were "
            "registered after the model was wrapped, on sharded parameters, to which autograd "
            "gives no gradient: they would never run. Register them before wrapping"
        )
    with unchecked():
        changed = []
        for pair in engine.pairs:
            trained = pair.group.key.requires_grad
            if pair.unsharded.requires_grad != trained or pair.sharded.requires_grad != trained:
                changed.append(pair.managed.fqns[0])
    if changed:
        names = ", ".join(changed[:5])
        raise RuntimeError(
            f"requires_grad of {names} ({len(changed)} parameters in all) has "
            "changed since the model was wrapped, which has no effect on gradient collection. "
            "Freeze parameters before wrapping, or give them a learning rate of 0 in the "
            "optimizer"
        )
