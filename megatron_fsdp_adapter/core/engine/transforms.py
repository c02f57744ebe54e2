"""Tensors inside of transforms of `torch.func`, and with tangents: those that backwards reach.

Inside of a transform a module is given wrappers of tensors, and its outputs are wrappers.

- A backward of the transform (`grad`, `vjp`) goes through these.
- One that runs after it goes through the tensors in them. Hooks on wrappers would never run.
- It goes through tangents too, as they depend on weights.
"""

from __future__ import annotations

import torch
from torch.autograd import forward_ad

functorch = torch._C._functorch  # type: ignore[attr-defined]


def is_inside() -> bool:
    """True inside of a transform."""
    return functorch.maybe_current_level() is not None


def are_plain() -> bool:
    """True if no tensor is a wrapper of a transform or has a tangent."""
    return functorch.maybe_current_level() is None and forward_ad._current_level < 0


def reached(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors behind `tensor`, itself included, that a backward may reach."""
    found = []
    pending = [tensor]
    while pending:
        one = pending.pop()
        if functorch.is_functorch_wrapped_tensor(one):
            pending.append(functorch.get_unwrapped(one))
        if functorch.is_batchedtensor(one):
            continue
        tangent = forward_ad.unpack_dual(one).tangent
        if tangent is not None:
            pending.append(tangent)
        if one.requires_grad:
            found.append(one)
    return found
