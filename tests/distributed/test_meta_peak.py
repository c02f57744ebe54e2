"""What a start on the meta device takes at most, measured by the operating system: a model of 1.5B
parameters on two processes."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_fsdp_adapter import FullyShardedDataParallel
from megatron_fsdp_adapter.core.engine.engine import FsdpEngine
from megatron_fsdp_adapter.diagnostics.memory import (
    BACKWARD_TO_STEP,
    LIFE,
    OPTIMIZER_STATE,
    UNIT_IN_USE,
    Precision,
    unit_bytes,
)
from tests.distributed.gpt import Case, ddp_config, init_megatron
from tests.distributed.launch import run_ranks

LAYERS, HIDDEN, FFN, HEADS, GROUPS, VOCAB = 16, 2048, 8192, 32, 8, 128256
"""The preset configs/llama-1.5b.yaml."""
SLACK = 40 * 2**20
"""Bytes beside weights: modules, gloo's buffers, what Python imports on the way."""
M_MMAP_THRESHOLD = -3
"""Of glibc's mallopt, from malloc.h."""


def _megabytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    [line] = [line for line in lines if line.startswith(field)]
    return int(line.split()[1]) * 1024


def build(layers: int) -> torch.nn.Module:
    """bf16, of which a process draws one layer after the other in float32."""
    model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=layers, hidden_size=HIDDEN, num_attention_heads=HEADS, num_query_groups=GROUPS,
        ffn_hidden_size=FFN, gated_linear_unit=True, activation_func=torch.nn.functional.silu,
        add_bias_linear=False, normalization="RMSNorm", bf16=True, params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16, bias_dropout_fusion=False, persist_layer_norm=False,
        use_cpu_initialization=True, init_model_with_meta_device=True,
    )  # fmt: skip
    with torch.device("meta"):
        model = GPTModel(
            config, get_gpt_layer_local_spec(normalization="RMSNorm"), vocab_size=VOCAB,
            max_sequence_length=2048, share_embeddings_and_output_weights=False,
            position_embedding_type="rope",
        )  # fmt: skip
    return Float16Module(config, model)


def allowed(engine: FsdpEngine) -> tuple[int, int]:
    """Bytes of the shards, and of the largest unit with everything that it has while in use."""
    policy = engine.config.policy
    precision = Precision(policy.main_params_dtype, policy.grads_dtype, policy.comm_dtype)
    shards, largest = 0, 0
    for unit in engine.units:
        held = unit_bytes(
            [group.held.layout for group in unit.groups], engine.config.strategy, precision, 0
        )
        passing = [n for k, n in held.items() if LIFE[k] in (UNIT_IN_USE, BACKWARD_TO_STEP)]
        kept = sum(held.values()) - sum(passing) - held.get(OPTIMIZER_STATE, 0)
        shards, largest = shards + kept, max(largest, sum(passing))
    return shards, largest


def _start(rank: int, world: int, layers: int) -> dict[str, int]:
    init_megatron()
    # Else glibc keeps blocks of up to 32 MiB that were freed between others: 16 MB a layer here.
    assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**20) == 1
    model = build(layers)
    numel = sum(param.numel() for param in model.parameters())
    options = {"megatron_fsdp_main_params_dtype": None}
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew from here
    before = _megabytes("VmRSS")
    wrapper = FullyShardedDataParallel(
        model.config, ddp_config(Case(bf16=True), "optim_grads_params", options), model
    )
    peak = _megabytes("VmHWM") - before
    shards, unit = allowed(wrapper.engine)
    return {"parameters": numel, "peak": peak, "shards": shards, "unit": unit}


@pytest.mark.full
@pytest.mark.parametrize("layers", (2, LAYERS), ids=("2 layers", "1.5B"))
def test_peak_of_a_start_is_the_shards_and_one_unit(layers: int) -> None:
    """Main weights in bf16, so that shards take half of what they take in float32."""
    found = run_ranks(_start, 2, layers, timeout=500)
    for rank, one in enumerate(found):
        text = ", ".join(f"{name} {value / 1e9:.3f}e9" for name, value in one.items())
        print(f"rank {rank}: {text}")
        assert one["peak"] <= one["shards"] + one["unit"] + SLACK, text
        # A process that held the whole model once, or two units, would not pass.
        assert layers < LAYERS or 2 * one["parameters"] + one["unit"] > 1.2 * one["peak"], text
