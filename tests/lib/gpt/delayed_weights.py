"""Linear layers of core that make weight gradients when they are asked to, as those of Transformer
Engine do with `delay_wgrad_compute`; core's own ignore that option.

Checked against `backward_dw` of Transformer Engine 2.11 (module/base.py). Products are torch's; a
late gradient is added to `grad`, which Transformer Engine assigns."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import nn


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, later: list[Any]) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.later = later
        return nn.functional.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        ctx.later.append((x, grad))
        return grad @ weight, None, None


def delay_weight_gradients(model: nn.Module) -> list[str]:
    """Of the linear layers without bias below `model`'s decoder; what is appended to the list that
    is returned is "weights" for each gradient that was made late."""
    made: list[str] = []
    for module in model.decoder.modules():  # type: ignore[union-attr]
        if isinstance(module, (ColumnParallelLinear, RowParallelLinear)):
            _delay(module, made)
    return made


def _delay(module: Any, made: list[str]) -> None:
    later: list[tuple[torch.Tensor, torch.Tensor]] = []

    def forward(x: torch.Tensor, *unused: Any, **unused_too: Any) -> tuple[torch.Tensor, None]:
        output: torch.Tensor = _Product.apply(x, module.weight, later)  # type: ignore[no-untyped-call]
        return output, None

    @torch.no_grad()
    def backward_dw() -> None:
        x, grad = later.pop(0)
        found = grad.flatten(0, -2).t() @ x.flatten(0, -2)
        weight = module.weight
        weight.grad = found if weight.grad is None else weight.grad + found
        made.append("weights")

    module.forward = forward
    module.backward_dw = backward_dw
