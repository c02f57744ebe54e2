"""Exports of live models in the names of families that no checkpoint is converted to: transformers
loads them without a missing or a further tensor, and computes the same logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.distributed.launch import run_ranks

transformers = pytest.importorskip("transformers", reason="pip install transformers")
safetensors = pytest.importorskip("safetensors.torch", reason="pip install safetensors")

LAYERS, HIDDEN, HEADS, GROUPS, FFN, EXPERT, VOCAB, SEQ = 2, 32, 4, 2, 48, 24, 128, 12
TOLERANCE = 2e-5
"""Logits are near 1, in fp32: a few hundred roundings."""

EXPERTS: dict[str, Any] = {
    "num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": EXPERT,
    "moe_layer_freq": [0, 1], "moe_router_load_balancing_type": "none",
    "moe_token_dispatcher_type": "allgather",
}  # fmt: skip
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 12, "v_head_dim": 8}
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen2": ("Qwen2", {"num_key_value_heads": GROUPS}, {"add_qkv_bias": True}),
    "qwen3": (
        "Qwen3", {"num_key_value_heads": GROUPS, "head_dim": 16},
        {"qk_layernorm": True, "kv_channels": 16},
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        {"num_key_value_heads": GROUPS, "head_dim": 16, "num_experts": 4, "mlp_only_layers": [0],
         "num_experts_per_tok": 2, "moe_intermediate_size": EXPERT, "norm_topk_prob": True},
        {"qk_layernorm": True, "kv_channels": 16, **EXPERTS},
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {"num_key_value_heads": HEADS, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1,
         "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": EXPERT,
         "first_k_dense_replace": 1, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
         "routed_scaling_factor": 1.0, "norm_topk_prob": True, "num_nextn_predict_layers": 0,
         **LATENT},
        {"multi_latent_attention": True, "qk_layernorm": True, "qk_head_dim": 8,
         "qk_pos_emb_head_dim": 4, "rope_type": "rope", "num_query_groups": HEADS,
         "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True,
         "moe_shared_expert_intermediate_size": EXPERT, **LATENT, **EXPERTS},
    ),
}  # fmt: skip


def theirs(family: str) -> Any:
    """The config of transformers."""
    name, more, _ = FAMILIES[family]
    return getattr(transformers, f"{name}Config")(
        hidden_size=HIDDEN, intermediate_size=FFN, vocab_size=VOCAB, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, max_position_embeddings=64, rms_norm_eps=1e-6,
        rope_theta=10000.0, tie_word_embeddings=False, **more,
    )  # fmt: skip


def ours(family: str) -> tuple[Any, Any]:
    """Core's config and model, without Transformer Engine, of random values."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.transformer_config import (
        MLATransformerConfig,
        TransformerConfig,
    )

    from tests.distributed.topologies import GatheringAttention

    fields = {"num_query_groups": GROUPS, **FAMILIES[family][2]}
    latent = "multi_latent_attention" in fields
    config = (MLATransformerConfig if latent else TransformerConfig)(
        num_layers=LAYERS, hidden_size=HIDDEN, ffn_hidden_size=FFN, num_attention_heads=HEADS,
        normalization="RMSNorm", gated_linear_unit=True, add_bias_linear=False,
        activation_func=torch.nn.functional.silu, attention_dropout=0.0, hidden_dropout=0.0,
        bias_dropout_fusion=False, persist_layer_norm=False, use_cpu_initialization=True,
        layernorm_epsilon=1e-6, **fields,
    )  # fmt: skip
    torch.manual_seed(7)
    model_parallel_cuda_manual_seed(7)
    spec = get_gpt_decoder_block_spec(config, False, normalization="RMSNorm")
    if latent:
        for layer in spec.layer_specs:
            layer.submodules.self_attention.submodules.core_attention = GatheringAttention
    with mock.patch.object(multi_latent_attention, "HAVE_TE", False):
        model = GPTModel(
            config, spec, vocab_size=VOCAB, max_sequence_length=64, rotary_base=10000,
            share_embeddings_and_output_weights=False, position_embedding_type="rope",
        )  # fmt: skip
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param) * 0.1)
        for name, buffer in model.named_buffers():
            if name.endswith("expert_bias"):
                buffer.copy_(torch.randn_like(buffer) * 0.1)
    return config, model.eval()


def tokens() -> torch.Tensor:
    return torch.randint(0, VOCAB, (2, SEQ), generator=torch.Generator().manual_seed(3))


def exported(rank: int, world: int, family: str, folder: str) -> tuple[list[str], float, float]:
    """Names that transformers misses or does not know, the largest difference of logits, and how
    much they differ among each other."""
    from megatron.core.distributed import DistributedDataParallelConfig

    from megatron_fsdp_adapter import FullyShardedDataParallel, export_weights
    from tests.distributed.gpt import init_megatron

    init_megatron()
    config, model = ours(family)
    positions = torch.arange(SEQ).expand(2, -1)
    mask = torch.ones(SEQ, SEQ, dtype=torch.bool).triu(1)[None, None]
    with torch.no_grad():
        expected = model(tokens(), positions, mask)
    ddp = DistributedDataParallelConfig(
        use_megatron_fsdp=True, use_distributed_optimizer=True, overlap_grad_reduce=True,
        overlap_param_gather=True, data_parallel_sharding_strategy="optim_grads_params",
    )  # fmt: skip
    wrapper = FullyShardedDataParallel(config, ddp, model)
    found = dict(export_weights(wrapper, theirs(family), dtype=None))
    if rank > 0:
        return [], 0.0, 1.0
    theirs(family).save_pretrained(folder)
    safetensors.save_file(
        {name: value.contiguous() for name, value in found.items()},
        Path(folder) / "model.safetensors", {"format": "pt"},
    )  # fmt: skip
    loaded, said = getattr(transformers, f"{FAMILIES[family][0]}ForCausalLM").from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    wrong = [str(said[kind]) for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")
             if said[kind]]  # fmt: skip
    with torch.no_grad():
        logits = loaded.eval()(tokens()).logits
    return wrong, float((logits - expected).abs().max()), float(expected.std())


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_computes_the_same_logits_with_exported_weights(
    family: str, tmp_path: Path
) -> None:
    for wrong, error, spread in run_ranks(exported, 2, family, str(tmp_path), timeout=240):
        assert wrong == []
        assert spread > 0.1 and error <= TOLERANCE, (error, spread)
