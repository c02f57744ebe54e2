"""A linear layer that writes its weight gradient by itself, as fused ones do."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def taken_early(weight: Any) -> tuple[Any, bool] | None:
    """What a module takes from `weight` in forward, for its backward; None unless it `asks_early`.

    Checked against Transformer Engine 2.20.2 (module/linear.py, layernorm_linear.py,
    layernorm_mlp.py, grouped_linear.py: flag and function are both taken in forward).
    """
    if not getattr(weight, "asks_early", False):
        return None
    return weight.get_main_grad, weight.overwrite_main_grad


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
    """`x @ weight.T` whose backward writes the weight gradient by itself."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: nn.Parameter) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.early = weight, taken_early(weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (x,), weight = ctx.saved_tensors, ctx.weight
        by_weight = grad.flatten(0, -2).t() @ x.flatten(0, -2)
        return grad @ weight, left_to_autograd(weight, by_weight, ctx.early)


class HabitualProduct(torch.autograd.Function):
    """`FusedProduct` with any habit in what it asks of a weight, and of which one. As
    `module/linear.py` of Transformer Engine writes gradients: 2.11 "asks in backward", 2.20.2 "asks
    in forward" and takes the function then too."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Any, habit: str) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight, ctx.habit = weight, habit
        ctx.early = getattr(weight, "overwrite_main_grad", False)
        ctx.getter = getattr(weight, "get_main_grad", None)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        weight, (x, saved) = ctx.weight, ctx.saved_tensors
        by_weight, main = grad.flatten(0, -2).t() @ x.flatten(0, -2), weight.main_grad
        if hasattr(weight, "__fsdp_param__"):
            asks_early = ctx.habit in ("asks in forward", "always overwrites")
            main = ctx.getter() if asks_early else weight.get_main_grad()
        if ctx.habit == "writes nothing":
            return grad @ weight, by_weight, None
        overwrites = {
            "asks in backward": getattr(weight, "overwrite_main_grad", False),
            "asks what it saved": getattr(saved, "overwrite_main_grad", False),
            "asks in forward": ctx.early,
            "asks for the flag in forward": ctx.early,
            "asks the quantized weight": False,
            "adds": False,
            "always overwrites": True,
        }
        write = main.copy_ if overwrites[ctx.habit] else main.add_
        write(by_weight)
        return grad @ weight, None, None


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
        self.weight, self.bias = linear.weight, linear.bias
