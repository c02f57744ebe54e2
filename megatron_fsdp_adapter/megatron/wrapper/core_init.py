"""Initialization of the modules of megatron-core that have no `reset_parameters`.

Core's own linear layers and embeddings draw their weights in their constructors, and cannot draw
them again. The functions in `ROWS` draw the same numbers in the same way: by the functions of the
config that the module was given, under core's tracker of random states.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from megatron.core.tensor_parallel.random import (
    get_cuda_rng_tracker,
    get_expert_parallel_rng_tracker_name,
)
from megatron.core.transformer.moe.router import Router
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from torch import nn

from ...build.materialize import Initializer, InitializerOf, own_initializer
from ..compat import core_api

Fill = Callable[[torch.Tensor], Any]
Params = Mapping[str, nn.Parameter]


def _fill_split(
    config: Any, module: Any, was: Params, whole: tuple[int, int], dim: int, fill: Fill
) -> None:
    """Initializes the weight of a layer that tensor parallelism splits along `dim` of the `whole`
    shape. was: the module's former parameters, with their attributes."""
    weight = module.weight
    if not config.perform_initialization:
        weight.zero_()
    elif config.use_cpu_initialization:
        # As core does, but without its two copies: the whole weight in float32, of which each
        # tensor-parallel rank takes its pieces.
        drawn = torch.empty(whole, dtype=torch.float32, device="cpu")
        fill(drawn)
        length = weight.shape[dim] // getattr(was["weight"], "partition_stride", 1)
        group = module.tp_group
        pieces = drawn.split(length, dim)[group.rank() :: group.size()]
        for part, piece in zip(weight.split(length, dim), pieces, strict=True):
            part.copy_(piece)
    elif getattr(module, "is_expert", False):
        with get_cuda_rng_tracker().fork(get_expert_parallel_rng_tracker_name()):
            fill(weight)
    else:
        with get_cuda_rng_tracker().fork():
            fill(weight)


def _linear(config: Any, module: Any, was: Params) -> None:
    own = module.config
    is_row = isinstance(module, RowParallelLinear)
    fill = own.output_layer_init_method if is_row else own.init_method
    if module.weight is not None:
        whole = (module.output_size, module.input_size)
        _fill_split(own, module, was, whole, int(is_row), fill)
    if module.bias is not None:
        module.bias.zero_()


def _vocabulary(config: Any, module: Any, was: Params) -> None:
    whole = (module.num_embeddings, module.embedding_dim)
    _fill_split(config, module, was, whole, 0, config.embedding_init_method)


def _in_float32(config: Any, param: torch.Tensor, fill: Fill) -> None:
    """Initializes a parameter as core does: drawn in float32 on the CPU, whatever the model's dtype
    and device, and then rounded."""
    drawn = torch.zeros(param.shape, dtype=torch.float32, device="cpu")
    if config.perform_initialization:
        fill(drawn)
    param.copy_(drawn)


def _extra_embedding(config: Any, module: Any, was: Params) -> None:
    """Initializes an embedding of positions or token types. Torch's constructor draws, and core
    draws again over it."""

    def draw_twice(drawn: torch.Tensor) -> None:
        nn.init.normal_(drawn)
        config.embedding_init_method(drawn)

    _in_float32(config, module.weight, draw_twice)


def _gate(config: Any, module: Any, was: Params) -> None:
    for param in module._parameters.values():
        if param is not None:
            _in_float32(module.config, param, module.config.init_method)


def _marked_whole(module: Any, was: Params) -> None:
    """Initializes a TELinear by its `reset_parameters`, and then marks whole weights as core's
    constructor does. At that time these are the parameters that have `sequence_parallel`."""
    module.reset_parameters()
    for name, param in module._parameters.items():
        if param is not None and hasattr(was[name], "sequence_parallel"):
            param.tensor_model_parallel = False


ROWS: tuple[tuple[type[nn.Module], Callable[[Any, Any, Params], None]], ...] = (
    (ColumnParallelLinear, _linear),
    (RowParallelLinear, _linear),
    (VocabParallelEmbedding, _vocabulary),
    (Router, _gate),
    (SharedExpertMLP, _gate),
)

DRAWN_BY_ITS_HOLDER = (nn.Linear, nn.Embedding)
"""Torch's modules, which core constructs and then fills itself: their own `reset_parameters` would
draw from another distribution."""


def core_initializers(config: Any) -> InitializerOf:
    """The initializers of a model of core with this `TransformerConfig`: the rows above, then
    `reset_parameters`, which Transformer Engine's modules, torch's and core's norms have."""

    def initializer_of(module: nn.Module, parent: nn.Module | None) -> Initializer | None:
        for kind, row in ROWS:
            if isinstance(module, kind):
                return functools.partial(row, config)
        if type(module) in DRAWN_BY_ITS_HOLDER and type(parent).__module__.startswith("megatron."):
            if isinstance(parent, LanguageModelEmbedding):
                return functools.partial(_extra_embedding, config)
            return None
        if type(module).__name__ == "TELinear" and core_api.marks_whole_weights(type(module)):
            return _marked_whole
        return own_initializer(module, parent)

    return initializer_of
