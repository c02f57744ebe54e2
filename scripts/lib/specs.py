"""What a transformer layer is made of: a `ModuleSpec` for the CPU and for a GPU.

"local" is the package's `local_spec`, which runs anywhere. "transformer_engine" uses TE's modules
and needs a GPU.
"""

from __future__ import annotations

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_fsdp_adapter.megatron.local_spec import TorchAttention, TorchNorm, local_layer_spec

__all__ = ["TorchAttention", "TorchNorm", "layer_spec", "local_layer_spec"]


def layer_spec(
    config: TransformerConfig, transformer_impl: str
) -> ModuleSpec | TransformerBlockSubmodules:
    """The spec that GPTModel takes, for ``transformer_impl`` "local" or "transformer_engine"."""
    if transformer_impl == "transformer_engine":
        return get_gpt_layer_with_transformer_engine_spec(
            num_experts=config.num_moe_experts,
            moe_grouped_gemm=config.moe_grouped_gemm,
            qk_layernorm=config.qk_layernorm,
        )
    layers = get_num_layers_to_build(config)
    return TransformerBlockSubmodules(
        layer_specs=[local_layer_spec(config)] * layers, layer_norm=TorchNorm
    )
