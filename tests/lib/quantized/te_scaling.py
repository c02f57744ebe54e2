"""Delayed scaling in a GPT of core's own layers: each linear layer has the state that Transformer
Engine's has, in TE's own classes, notes amaxes as it would, and updates scales at a step's end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.lib.quantized.emulated import quantized_parameter
from tests.lib.quantized.te_weights import te_parameter

LENGTH = 3


def recipe_state(mode: str, count: int, length: int = LENGTH) -> Any:
    """TE's state of `count` tensors."""
    import transformer_engine.pytorch.tensor.float8_tensor  # noqa: F401  TE's imports go in a ring
    from transformer_engine.common.recipe import DelayedScaling
    from transformer_engine.pytorch.quantization import DelayedScalingRecipeState

    recipe = DelayedScaling(amax_history_len=length, reduce_amax=False)
    return DelayedScalingRecipeState(recipe, mode=mode, num_quantizers=count, device="cpu")


def linears(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Names and modules whose weight is that of a GEMM of a layer."""
    return [
        (name, module)
        for name, module in model.named_modules()
        if ".linear_" in f".{name}"
        and "decoder" in name
        and module._parameters.get("weight") is not None
    ]


def quantize_layers(model: nn.Module, recipe: str) -> None:
    """Quantizes the weights of the linear layers of a GPT."""
    for _, module in linears(model):
        param: Any = module._parameters["weight"]
        made = quantized_parameter(param.detach(), recipe)
        made.__dict__.update(param.__dict__)
        module._parameters["weight"] = made.requires_grad_(param.requires_grad)


def scale_layers(model: nn.Module, length: int = LENGTH) -> None:
    """Gives the linear layers of a GPT delayed scaling, and quantized weights."""
    for _, module in linears(model):
        forward = recipe_state("forward", 3, length)
        backward = recipe_state("backward", 2, length)
        module.fp8_meta = {  # type: ignore[assignment]
            "recipe": forward.recipe,
            "scaling_fwd": forward,
            "scaling_bwd": backward,
        }
        module.param_init_meta = {"weight": SimpleNamespace(fp8_meta_index=1)}  # type: ignore
        weight: Any = module._parameters["weight"]
        module._parameters["weight"] = te_parameter(weight, forward.make_quantizers()[1])
        module.register_forward_pre_hook(
            lambda module, args: _note(module.fp8_meta["scaling_fwd"].amax_history[:, 0], args[0])
        )
        module.register_forward_hook(_note_gradient)


def _note(history: torch.Tensor, value: torch.Tensor) -> None:
    history[0] = torch.maximum(history[0], value.detach().float().abs().max())


def _note_gradient(module: Any, args: Any, output: Any) -> None:
    if output[0].requires_grad:
        history = module.fp8_meta["scaling_bwd"].amax_history[:, 0]
        output[0].register_hook(lambda grad: _note(history, grad))


LARGEST = {"forward": 448.0, "backward": 57344.0}
"""Of E4M3 and E5M2: the recipe's format is hybrid."""


def roll(model: nn.Module) -> None:
    """TE's update after a forward and backward, amaxes reduced over all ranks.

    Checked against `kernel_bulk` of common/recipe/delayed_scaling.cu (2.11 and main of 2026-08):
    a tensor whose newest amax is 0 keeps history and scale, and one whose largest amax is not
    finite keeps its scale. TE does this at the end of each forward and of each backward, and for
    quantized weights after the optimizer's step; here it is once a step.
    """
    states = []
    for _, module in linears(model):
        meta: Any = module.fp8_meta
        states.append((meta["scaling_fwd"], LARGEST["forward"]))
        states.append((meta["scaling_bwd"], LARGEST["backward"]))
    slots = torch.cat([state.amax_history[0] for state, _ in states])
    dist.all_reduce(slots, dist.ReduceOp.MAX)
    sizes = [state.scale.numel() for state, _ in states]
    for (state, largest), newest in zip(states, slots.split(sizes), strict=True):
        history = state.amax_history
        moved = newest != 0
        rolled = torch.cat((history[1:], newest[None]))
        amax = torch.where(moved, rolled.amax(0), 0.0)
        scale = (largest / amax).clamp(max=torch.finfo(torch.float32).max)
        state.scale.copy_(torch.where(amax.isfinite() & (amax > 0), scale, state.scale))
        rolled[0] = 0
        history.copy_(torch.where(moved, rolled, history))
