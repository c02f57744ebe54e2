"""Builds a model chunk as Megatron-LM's scripts do, from options with Megatron's names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.core import parallel_state, tensor_parallel
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from ..compat import patches
from ..compat.table import FUSED_WGRAD


def gpt_model(
    config: TransformerConfig,
    layers: Any,
    options: Mapping[str, Any],
    stage: int | None = None,
    mtp: Any = None,
) -> Any:
    """Core's GPTModel for this rank's pipeline stage, with the attributes that Megatron reads on
    parameters.

    layers, mtp: specs of its layers and of multi-token prediction. stage: the virtual stage."""
    if config.gradient_accumulation_fusion:
        patches.install(FUSED_WGRAD)
    is_untied = options.get("untie_embeddings_and_output_weights")
    model: Any = GPTModel(
        config,
        layers,
        vocab_size=options["padded_vocab_size"],
        max_sequence_length=options["max_position_embeddings"],
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
        share_embeddings_and_output_weights=not is_untied,
        position_embedding_type=options["position_embedding_type"],
        rotary_percent=options.get("rotary_percent") or 1.0,
        rotary_base=options.get("rotary_base") or 10000,
        mtp_block_spec=mtp,
        vp_stage=stage,
    )
    model.model_type = ModelType.encoder_or_decoder
    for param in model.parameters():
        tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(param)
    return model


def in_compute_dtype(config: TransformerConfig, model: Any) -> Any:
    """The model itself, or inside of core's Float16Module if the config asks for 16 bits."""
    if config.bf16 or config.fp16:
        return Float16Module(config, model)
    return model
