"""How many layers megatron-core builds on each stage."""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
from megatron.core import parallel_state as ps
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

WIDTHS = {"hidden_size": 64, "num_attention_heads": 4}


def layers_of_core(options: dict[str, Any]) -> list[list[int]] | None:
    """`found[stage][chunk]`, by megatron-core; None where it refuses. Layers are numbered in the
    order of the chunks."""
    stages = options.get("pipeline_model_parallel_size", 1)
    try:
        config = TransformerConfig(**{**WIDTHS, **options}, pipeline_dtype=torch.float32)
        chunks = config.virtual_pipeline_model_parallel_size
        found = [[0] * (chunks or 1) for _ in range(stages)]
        begin = 0
        ps.set_virtual_pipeline_model_parallel_world_size(chunks)
        for chunk, stage in product(range(chunks or 1), range(stages)):
            ps.set_pipeline_model_parallel_rank(stage)
            place = {"vp_stage": chunk if chunks else None, "pp_rank": stage}
            found[stage][chunk] = get_num_layers_to_build(config, **place)
            assert get_transformer_layer_offset(config, **place) == begin, place
            begin += found[stage][chunk]
    except (AssertionError, ValueError, ZeroDivisionError):
        return None
    finally:
        ps.set_virtual_pipeline_model_parallel_world_size(None)
        ps.set_pipeline_model_parallel_rank(None)
    return None if min(map(min, found)) < 0 else found  # core does not look at that
