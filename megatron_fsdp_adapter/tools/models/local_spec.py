"""A transformer layer that also runs on a CPU: core's tensor-parallel linear layers, with attention
and norms of torch.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor


class TorchAttention(torch.nn.Module):
    """Scaled dot product attention from torch, with core's `core_attention` interface.

    Core's own DotProductAttention keeps the whole score matrix. Without fused kernels it masks and
    normalizes that in separate steps, which is several times slower on a CPU.

    Supported: causal or no mask, grouped queries, dropout. Not supported: packed sequences, a bias,
    context parallelism.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
    ) -> None:
        super().__init__()
        if config.context_parallel_size != 1:
            raise ValueError(
                f"context_parallel_size is {config.context_parallel_size}, which the local "
                "attention does not support. Use --transformer-impl transformer_engine"
            )
        if attn_mask_type not in (AttnMaskType.causal, AttnMaskType.no_mask):
            raise ValueError(
                f"attn_mask_type is {attn_mask_type}: the local attention supports causal and "
                "no_mask"
            )
        self.config = config
        self.causal = attn_mask_type == AttnMaskType.causal
        self.softmax_scale = softmax_scale
        if attention_dropout is None:
            attention_dropout = config.attention_dropout
        self.dropout = attention_dropout

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """The attention's output, (sq, batch, heads * d). query: (sq, batch, heads, d). key, value:
        (sk, batch, groups, d). `attention_mask` is not read: the layer's kind of mask decides."""
        if attention_bias is not None or packed_seq_params is not None:
            raise ValueError("the local attention supports neither a bias nor packed sequences")
        dropout = self.dropout if self.training else 0.0
        # (s, batch, heads, d) -> (batch, heads, s, d)
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        with self._random_numbers(dropout):
            context = torch.nn.functional.scaled_dot_product_attention(
                query,
                key,
                value,
                dropout_p=dropout,
                is_causal=self.causal and query.size(2) > 1,
                scale=self.softmax_scale,
                enable_gqa=key.size(1) != query.size(1),
            )
        return context.permute(2, 0, 1, 3).flatten(2)

    def _random_numbers(self, dropout: float) -> contextlib.AbstractContextManager[Any]:
        """A context in which each tensor-parallel rank draws its own random numbers, because heads
        are split over these ranks."""
        # With sequence parallelism core's block runs all layers in such a context already.
        if dropout == 0.0 or self.config.sequence_parallel:
            return contextlib.nullcontext()
        return tensor_parallel.get_cuda_rng_tracker().fork()


class TorchNorm:
    """LayerNorm or RMSNorm from torch: a call returns a module of torch, not an instance of this
    class.

    Core's WrappedTorchNorm refuses sequence parallelism. This class marks the parameters for it:
    finalize_model_grads sums the gradients of marked ones over the tensor-parallel ranks.
    """

    def __new__(  # type: ignore[misc]
        cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: Any
    ) -> torch.nn.Module:
        kinds = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm}
        norm = kinds[config.normalization](hidden_size, eps=eps, dtype=config.params_dtype)
        for param in norm.parameters():
            param.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm


def local_layer_spec(config: TransformerConfig, with_experts: bool = True) -> ModuleSpec:
    """The spec of a layer made of core's linear layers, `TorchAttention` and `TorchNorm`.
    with_experts: False for an MLP in a model with experts."""
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts if with_experts else None,
        multi_latent_attention=config.multi_latent_attention,
        moe_grouped_gemm=config.moe_grouped_gemm,
        qk_layernorm=config.qk_layernorm,
        normalization=config.normalization,
    )
    layer = spec.submodules
    layer.input_layernorm = TorchNorm
    layer.pre_mlp_layernorm = TorchNorm
    attention = layer.self_attention.submodules
    attention.core_attention = TorchAttention
    if config.qk_layernorm and not config.multi_latent_attention:
        attention.q_layernorm = TorchNorm
        attention.k_layernorm = TorchNorm
    return spec


def local_block_spec(
    config: TransformerConfig, vp_stage: int | None = None
) -> TransformerBlockSubmodules:
    """The spec of this rank's pipeline stage, or of a virtual one: layers by `local_layer_spec`,
    with experts if `moe_layer_freq` says so, and a last norm."""
    first = get_transformer_layer_offset(config, vp_stage)
    numbers = range(first, first + get_num_layers_to_build(config, vp_stage))
    frequency = config.moe_layer_freq
    layers = []
    for number in numbers:
        if isinstance(frequency, list):
            with_experts = bool(frequency[number])
        else:
            with_experts = number % frequency == 0
        layers.append(local_layer_spec(config, with_experts))
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=TorchNorm)  # type: ignore[arg-type]
