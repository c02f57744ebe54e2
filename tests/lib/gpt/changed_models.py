"""What users do to models and with wrappers beside the plain loop, a row each: changes of a model.
What is frozen, tied or recomputed and nothing more is a cell of the
matrix; in which order, how often and whether at all parts of a model are called, and what is
evaluated between, are events of `tests/lib/engine/scenarios.py`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)

from .variants import STRATEGIES, ZERO_3, Drive, Variant, train


def inner_model(wrapper: Any) -> Any:
    """The GPTModel under any depth of wrappers."""
    while not hasattr(wrapper, "decoder"):
        wrapper = wrapper.module
    return wrapper


# Changes of the model, before it is wrapped.


def freeze(*prefixes: str) -> Callable[[nn.Module], None]:
    def change(model: nn.Module) -> None:
        frozen = [p for n, p in model.named_parameters() if n.startswith(prefixes)]
        assert frozen, prefixes
        for param in frozen:
            param.requires_grad_(False)

    return change


def add_unused_params(model: nn.Module) -> None:
    """One in a layer, larger than the layer's norms, and one outside all layers."""
    first: Any = inner_model(model).decoder.layers[0]
    device = next(model.parameters()).device
    first.never_used = nn.Parameter(torch.linspace(-1, 1, 35, device=device).view(7, 5))
    inner_model(model).never_used = nn.Parameter(torch.linspace(-1, 1, 3, device=device))


def checkpoint_layers(how: CheckpointImpl) -> Callable[[nn.Module], None]:
    """Layers are recomputed in backward, their hooks included."""

    def change(model: nn.Module) -> None:
        layers = inner_model(model).decoder.layers
        for index, layer in enumerate(layers):
            layers[index] = checkpoint_wrapper(layer, how)

    return change


class Mixer(nn.Module):
    """In the place of core's Mamba mixer, whose kernels are CUDA only: like that one it reads its
    convolution's weight and never calls the convolution."""

    def __init__(self, config: Any, d_model: int, **unused: Any) -> None:
        super().__init__()
        self.conv1d = nn.Conv1d(d_model, d_model, 3, groups=d_model)
        self.out_proj = nn.Linear(d_model, d_model)

    def forward(self, hidden: torch.Tensor, **unused: Any) -> Any:
        mixed = nn.functional.conv1d(
            hidden.permute(1, 2, 0),
            self.conv1d.weight,
            self.conv1d.bias,
            padding=2,
            groups=hidden.size(-1),
        )
        return self.out_proj(mixed[..., : hidden.size(0)].permute(2, 0, 1)), None


class Mamba(MambaLayer):
    """Returns what a transformer layer does."""

    def forward(self, hidden_states: torch.Tensor, **unused: Any) -> Any:
        return super().forward(hidden_states), None


def add_mamba_layers(model: nn.Module) -> None:
    """Behind the transformer layers, as many of Mamba."""
    decoder = inner_model(model).decoder
    submodules = MambaLayerSubmodules(mixer=Mixer, mamba_bda=get_bias_dropout_add)
    for _ in range(len(decoder.layers)):
        layer = Mamba(decoder.config, submodules, pg_collection=ProcessGroupCollection())
        decoder.layers.append(layer.to(next(model.parameters()).device))


def _habit(
    name: str, change: Any = Variant.change, case: Any = None, drive: Drive = train, **more: Any
) -> Variant:
    sizes = {"num_layers": 2, "tied": False, "positions": "rope", "batch": 1, **(case or {})}
    return Variant(
        name, random=True, case=sizes, change=change, drive=drive, compare="free", **more
    )


NO_BIAS = {"bias": False}
NESTED = {"fsdp_unit_modules": [TransformerLayer, MLP]}
"""Layers as units, and their MLPs as units inside them. Core's MLP returns its bias for others to
add, which a unit cannot: its weights are gone by then, and reading them raises."""
HAS_TE = importlib.util.find_spec("transformer_engine") is not None

ROWS: tuple[Variant, ...] = (
    _habit("frozen tied embedding", freeze("embedding."), {"tied": True}),
    _habit("part of a layer frozen", freeze("decoder.layers.0.mlp.linear_fc1")),
    _habit("parameters without a gradient", add_unused_params),
    _habit(
        "full recompute, tied, frozen first layer",
        freeze("decoder.layers.0."),
        {"tied": True, "recompute": "full-1"},
    ),
    *(
        # Core runs it only where Transformer Engine is installed.
        _habit(name, case={"recompute": "selective-layernorm"})
        for name in ("selective recompute of norms",)
        if HAS_TE
    ),
    _habit("reentrant checkpoint around layers", checkpoint_layers(CheckpointImpl.REENTRANT)),
    _habit("hybrid of transformer and Mamba layers", add_mamba_layers),
    _habit(
        "units inside units, full recompute",
        case={**NO_BIAS, "recompute": "full-1"},
        wrapper=NESTED,
    ),
    _habit(
        "units inside units, checkpoint around layers",
        checkpoint_layers(CheckpointImpl.NO_REENTRANT),
        NO_BIAS,
        wrapper=NESTED,
    ),
    _habit(
        "units inside units, part frozen",
        freeze("decoder.layers.0.mlp."),
        NO_BIAS,
        wrapper=NESTED,
    ),
)

HABITS = tuple(
    replace(row, strategies=(STRATEGIES[position % 3], ZERO_3)) for position, row in enumerate(ROWS)
)
"""With ZeRO-3 and one of the other strategies."""
