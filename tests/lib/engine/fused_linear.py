"""A linear layer that writes its weight gradient by itself, as fused ones do."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def main_of(weight: Any) -> Any:
    """The main gradient that a weight has at present."""
    if hasattr(weight, "get_main_grad"):
        return weight.get_main_grad()
    return weight.main_grad


def _asks_in_backward(weight):
    return None


def _asks_what_it_saved(weight):
    return None


def _asks_in_forward(weight):
    return (
        (weight.get_main_grad, getattr(weight, "overwrite_main_grad", False))
        if hasattr(weight, "get_main_grad")
        else None
    )


def _asks_for_the_flag_in_forward(weight):
    return (
        functools.partial(main_of, weight),
        getattr(weight, "overwrite_main_grad", False),
    )


def _asks_the_quantized_weight(weight):
    return (functools.partial(main_of, weight), False)


def _adds(weight):
    return (functools.partial(main_of, weight), False)


def _always_overwrites(weight):
    return (
        getattr(weight, "get_main_grad", lambda: weight.main_grad),
        True,
    )


def _writes_nothing(weight):
    return None


HABITS: dict[str, Callable[[Any], tuple[Any, bool] | None]] = {
    "asks in backward": _asks_in_backward,
    "asks what it saved": _asks_what_it_saved,
    "asks in forward": _asks_in_forward,
    "asks for the flag in forward": _asks_for_the_flag_in_forward,
    "asks the quantized weight": _asks_the_quantized_weight,
    "adds": _adds,
    "always overwrites": _always_overwrites,
    "writes nothing": _writes_nothing,
}
"""What a module takes from a weight in forward, for its backward: the function that gives the main
gradient, and whether it overwrites that."""


def taken_early(weight: Any) -> tuple[Any, bool] | None:
    """What a module takes from `weight` in forward; None unless it `asks_early`.

    Checked against Transformer Engine 2.20.2 (module/linear.py, layernorm_linear.py,
    layernorm_mlp.py, grouped_linear.py: flag and function are both taken in forward).
    """
    asks_early = getattr(weight, "asks_early", False)
    return HABITS["asks in forward" if asks_early else "asks in backward"](weight)


def left_to_autograd(
    weight: Any, by_weight: torch.Tensor, early: tuple[Any, bool] | None = None
) -> torch.Tensor | None:
    """None where the weight gradient is written into `main_grad`, as core and Transformer Engine
    write it; else the gradient. early: what was taken in forward.

    Checked against Transformer Engine 2.11 (module/linear.py: `main_grad` is what
    `get_main_grad()` returns, overwritten where `overwrite_main_grad` is set) and core 0.16.1 and
    0.19.0 (tensor_parallel/layers.py: the same assignment for `__fsdp_param__`, and then always
    overwritten). Neither returns a gradient of a weight without `grad_added_to_main_grad`.
    """
    if early is not None:
        main = weight.main_grad = early[0]()
        write = main.copy_ if early[1] else main.add_
    elif hasattr(weight, "get_main_grad"):
        main = weight.main_grad = weight.get_main_grad()
        write = main.copy_ if weight.overwrite_main_grad else main.add_
    elif hasattr(weight, "main_grad"):
        write = weight.main_grad.add_
    else:
        return by_weight
    write(by_weight)
    return None


class FusedProduct(torch.autograd.Function):
    """`x @ weight.T` whose backward writes the weight gradient by itself, as the weight asks, or
    with any habit in what it asks of a weight, and of which one. As `module/linear.py` of
    Transformer Engine writes gradients: 2.11 "asks in backward", 2.20.2 "asks in forward"."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Any, habit: str = "") -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight = weight
        ctx.habit = habit
        ctx.early = HABITS[habit](weight) if habit else taken_early(weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (x, saved) = ctx.saved_tensors
        weight = ctx.weight
        early = ctx.early
        left = grad.flatten(0, -2).t() @ x.flatten(0, -2)
        if ctx.habit == "asks what it saved":
            main = main_of(weight)
            early = (lambda: main), getattr(saved, "overwrite_main_grad", False)
        if ctx.habit != "writes nothing":
            left = left_to_autograd(weight, left, early)
        return grad @ weight, left, None


class FusedLinear(nn.Linear):
    """`nn.Linear` by way of `FusedProduct`, except where its weight is frozen."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.weight.requires_grad:
            return super().forward(x)
        return FusedProduct.apply(x, self.weight) + self.bias


class Operation(FusedLinear):
    """Has the parameters of a linear layer, as they are when it is made. Core makes those of
    Transformer Engine in the first forward, and keeps them where no module tree sees them (checked
    against `TEGroupedMLP` of core 0.19.2)."""

    def __init__(self, linear: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.weight = linear.weight
        self.bias = linear.bias
