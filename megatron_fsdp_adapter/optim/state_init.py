"""State of inner optimizers before their first step: what each kind keeps of a parameter, and how
that is made without a step."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

COUNT = "step"
"""The option in which fused optimizers count the steps of a group."""
ADAM, SGD = ("exp_avg", "exp_avg_sq"), ("momentum_buffer",)
FUSED = {"FusedAdam": ADAM, "FusedSGD": SGD}
"""Names of the classes of fused optimizers, as Transformer Engine and apex have them."""


def _init_torch_state(optimizer: Any, group: dict[str, Any]) -> None:
    """torch's own initialization of a group's state, which it runs at the start of a step. It
    skips parameters without a gradient, so each one stands in as its own for the moment. What it
    found goes into lists, of which each class wants its own number."""
    found: list[list[Any]] = [[] for _ in range(_lists_of(type(optimizer)))]
    before = [local.grad for local in group["params"]]
    for local in group["params"]:
        local.grad = local.detach()
    try:
        optimizer._init_group(group, *found)
    finally:
        for local, grad in zip(group["params"], before, strict=True):
            local.grad = grad


def _lists_of(kind: type) -> int:
    """Number of lists that `_init_group` fills: a subclass may take them as `*args` and pass them
    on."""
    for one in kind.__mro__:
        if "_init_group" in vars(one):
            wanted = inspect.signature(vars(one)["_init_group"]).parameters.values()
            if not any(each.kind is each.VAR_POSITIONAL for each in wanted):
                return len(wanted) - len(("self", "group"))
    raise AssertionError(f"{kind} has no _init_group that names its arguments")


def _init_fused_state(optimizer: Any, group: dict[str, Any]) -> None:
    """TE's and apex's FusedAdam keep two moments a parameter and the step in the group, which has
    no such entry before the first step: a load asks for what is there, and would leave it out."""
    group.setdefault(COUNT, 0)
    for local in group["params"]:
        if optimizer.state[local]:
            continue
        if hasattr(optimizer, "initialize_state"):
            optimizer.initialize_state(local, getattr(optimizer, "store_param_remainders", False))
        else:
            for name in ADAM:
                optimizer.state[local][name] = torch.zeros_like(local, dtype=torch.float32)


def moments_of(optimizer: Any) -> tuple[str, ...]:
    """Names of what Adam or SGD keeps in a parameter's shape: torch's, or the fused one of
    Transformer Engine or apex. () for any other optimizer."""
    if isinstance(optimizer, torch.optim.Adam):
        return ADAM
    if isinstance(optimizer, torch.optim.SGD):
        return SGD
    names = (base.__name__ for base in type(optimizer).__mro__)
    return next((FUSED[name] for name in names if name in FUSED), ())


def is_known(optimizer: Any) -> bool:
    """True if `make_state` makes what its first step would."""
    return is_torch_optimizer(optimizer) or bool(moments_of(optimizer))


def _init_momentum(optimizer: Any, group: dict[str, Any]) -> None:
    """Zeros. torch's begins with the first gradient, which is what a step makes of zeros. Without
    a momentum torch's keeps nothing, the fused one a buffer all the same."""
    if group["momentum"] == 0 and is_torch_optimizer(optimizer):
        return
    for local in group["params"]:
        if "momentum_buffer" not in optimizer.state[local]:
            optimizer.state[local]["momentum_buffer"] = torch.zeros_like(local)


def is_torch_optimizer(optimizer: Any) -> bool:
    """True if it is one of torch's own, or derived from one."""
    bases = (base for base in type(optimizer).__mro__ if base is not torch.optim.Optimizer)
    return any(base.__module__.startswith("torch.optim.") for base in bases)


@torch.no_grad()
def make_state(
    optimizer: Any, leaves_out: Callable[[dict[str, Any]], Any] = lambda group: False
) -> None:
    """State for the parameters that `optimizer` has now, without taking a step; not for those of
    groups that it `leaves_out`."""
    init = _init_torch_state if is_torch_optimizer(optimizer) else _init_fused_state
    if moments_of(optimizer) == SGD:
        init = _init_momentum
    for group in optimizer.param_groups:
        if not leaves_out(group):
            init(optimizer, group)
