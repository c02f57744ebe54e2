"""Families of Hugging Face models that can be counted: a table of `model_type`s, and how the
config.json of each is read.

A family is in the table if the count equals that of its published models
(`tests/tools/models/test_hugging_face.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .spec import Options

TIED = "tied"
"""Embedding and output layer have one weight. Like the next names it is no option of Megatron, and
becomes one when all values are read."""
FIRST_DENSE = "first_dense"
"""Number of first layers that have an MLP in place of experts."""
SHARED_EXPERTS = "shared_experts"
"""Number of shared experts, each as wide as another expert."""
ONE_GROUP = "one_group"
"""All heads share their keys and values."""
POSITIONS = "positions"
"""Tokens of the longest sequence."""


@dataclass(frozen=True)
class Family:
    """The rules by which the config.json of a model type is read.

    options: of all models of the family, by Megatron's names;
    reads: key of config.json -> the option with its value, or one of the names above;
    defaults: values of keys that a file may lack. All other keys of `reads` must be there;
    only: key -> the one value for which parameters are counted; a file may lack the key;
    ignores: keys that do not change the parameters of the family, but those of others."""

    options: Options
    reads: Mapping[str, str]
    defaults: Mapping[str, Any]
    only: Mapping[str, Any] = field(default_factory=dict)
    ignores: tuple[str, ...] = ()


def _family(
    base: Options,
    reads: Mapping[str, str] = {},
    defaults: Mapping[str, Any] = {},
    tied: bool = False,
    only: Mapping[str, Any] = {},
    ignores: tuple[str, ...] = (),
    unread: tuple[str, ...] = (),
    **options: Any,
) -> Family:
    """A family whose sizes have the usual keys, except those in `ignores` and `unread`. tied: the
    default; unread: keys with which a file is refused; options: beyond `base`."""
    sizes = {key: name for key, name in _SIZES.items() if key not in (*ignores, *unread)}
    given = {"tie_word_embeddings": tied, **_MAY_LACK, **defaults}
    return Family({**base, **options}, {**sizes, **reads}, given, only, ignores)


_SIZES = {
    "vocab_size": "vocab_size", "hidden_size": "hidden_size",
    "intermediate_size": "ffn_hidden_size", "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_attention_heads", "num_key_value_heads": "num_query_groups",
    "head_dim": "kv_channels", "tie_word_embeddings": TIED,
    "max_position_embeddings": POSITIONS,
}  # fmt: skip
_GPT2_SIZES = {
    "vocab_size": "vocab_size", "n_embd": "hidden_size", "n_inner": "ffn_hidden_size",
    "n_layer": "num_layers", "n_head": "num_attention_heads", "n_positions": POSITIONS,
    "tie_word_embeddings": TIED,
}  # fmt: skip
_MAY_LACK = {
    "num_key_value_heads": None, "head_dim": None, "max_position_embeddings": None,
    "num_nextn_predict_layers": None,
}  # fmt: skip

_LLAMA = {
    "position_embedding_type": "rope", "normalization": "RMSNorm", "swiglu": True,
    "add_bias_linear": False,
}  # fmt: skip
_NEOX = {
    "position_embedding_type": "rope", "normalization": "LayerNorm", "swiglu": False,
    "add_bias_linear": True,
}  # fmt: skip
_GPT2 = {**_NEOX, "position_embedding_type": "learned_absolute"}
_LATENT = {**_LLAMA, "multi_latent_attention": True, "qk_layernorm": True}

_NO_BIASES = {"attention_bias": False, "mlp_bias": False}
_EXPERTS_PER_TOKEN = {"num_experts_per_tok": "moe_router_topk"}
_MIXTRAL = {"num_local_experts": "num_experts", **_EXPERTS_PER_TOKEN}
_QWEN_MOE = {
    "num_experts": "num_experts", "moe_intermediate_size": "moe_ffn_hidden_size",
    **_EXPERTS_PER_TOKEN,
}  # fmt: skip
_OF_HEADS = ("head_dim", "num_key_value_heads", "qk_head_dim")
_ALL_SPARSE = {"decoder_sparse_step": 1, "mlp_only_layers": []}
_DEEPSEEK_MOE = {
    "n_routed_experts": "num_experts", "moe_intermediate_size": "moe_ffn_hidden_size",
    "n_shared_experts": SHARED_EXPERTS, "first_k_dense_replace": FIRST_DENSE,
    "num_nextn_predict_layers": "mtp_num_layers", **_EXPERTS_PER_TOKEN,
}  # fmt: skip
_DEEPSEEK = {
    **_DEEPSEEK_MOE, "q_lora_rank": "q_lora_rank", "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_head_dim", "qk_rope_head_dim": "qk_pos_emb_head_dim",
    "v_head_dim": "v_head_dim",
}  # fmt: skip

FAMILIES: Mapping[str, Family] = {
    "deepseek_v2": _family(
        _LATENT, _DEEPSEEK, only={**_NO_BIASES, "moe_layer_freq": 1}, ignores=_OF_HEADS,
    ),
    "deepseek_v3": _family(
        _LATENT, _DEEPSEEK, only={**_NO_BIASES, "moe_layer_freq": 1}, ignores=_OF_HEADS,
    ),
    "dots1": _family(_LLAMA, _DEEPSEEK_MOE, only={"attention_bias": False}, qk_layernorm=True),
    "exaone4": _family(_LLAMA, qk_layernorm=True),
    "gemma": _family(
        _LLAMA, defaults={"head_dim": 256}, tied=True, only={"attention_bias": False},
    ),
    "gemma2": _family(
        _LLAMA, defaults={"head_dim": 256}, tied=True, only={"attention_bias": False},
        post_layernorms=True,
    ),
    "gemma3_text": _family(
        _LLAMA, defaults={"head_dim": 256}, tied=True, only={"attention_bias": False},
        post_layernorms=True, qk_layernorm=True,
    ),
    "glm": _family(
        _LLAMA, {"attention_bias": "add_qkv_bias"}, {"attention_bias": True, "head_dim": 128},
    ),
    "glm4": _family(
        _LLAMA, {"attention_bias": "add_qkv_bias"}, {"attention_bias": True, "head_dim": 128},
        post_layernorms=True,
    ),
    "glm4_moe": _family(
        _LLAMA,
        {**_DEEPSEEK_MOE, "attention_bias": "add_qkv_bias", "use_qk_norm": "qk_layernorm"},
        {"attention_bias": False, "use_qk_norm": False},
    ),
    "gpt2": Family(_GPT2, _GPT2_SIZES, {"n_inner": None, "tie_word_embeddings": True}),
    "gpt_bigcode": Family(
        _GPT2, {**_GPT2_SIZES, "multi_query": ONE_GROUP},
        {"n_inner": None, "tie_word_embeddings": True, "multi_query": True},
        ignores=("num_key_value_heads",),
    ),
    "gpt_neox": _family(
        _NEOX, only={"attention_bias": True}, unread=("head_dim", "num_key_value_heads"),
    ),
    "gpt_oss": _family(
        _LLAMA, _MIXTRAL, {"head_dim": 64}, only={"attention_bias": True},
        add_bias_linear=True, softmax_type="learnable",
    ),
    "granite": _family(_LLAMA, only=_NO_BIASES),
    "granitemoe": _family(_LLAMA, _MIXTRAL, only={"attention_bias": False}),
    "llama": _family(_LLAMA, only=_NO_BIASES),
    "mistral": _family(_LLAMA),
    "mixtral": _family(_LLAMA, _MIXTRAL),
    "nemotron": _family(_NEOX, only=_NO_BIASES, add_bias_linear=False),
    "olmo2": _family(_LLAMA, only={"attention_bias": False}, qk_layernorm_of_all_heads=True),
    "olmo3": _family(_LLAMA, only={"attention_bias": False}, qk_layernorm_of_all_heads=True),
    "olmoe": _family(
        _LLAMA, {"num_experts": "num_experts", **_EXPERTS_PER_TOKEN},
        only={"attention_bias": False}, unread=("head_dim",), qk_layernorm_of_all_heads=True,
    ),
    "phi3": _family(_LLAMA, only={"attention_bias": False}),
    "qwen2": _family(_LLAMA, add_qkv_bias=True),
    "qwen2_moe": _family(
        _LLAMA,
        {
            **_QWEN_MOE, "qkv_bias": "add_qkv_bias",
            "shared_expert_intermediate_size": "moe_shared_expert_intermediate_size",
        },
        {"qkv_bias": True}, only=_ALL_SPARSE, moe_shared_expert_gate=True,
    ),
    "qwen3": _family(
        _LLAMA, defaults={"head_dim": 128}, only={"attention_bias": False}, qk_layernorm=True,
    ),
    "qwen3_moe": _family(
        _LLAMA, _QWEN_MOE, only={"attention_bias": False, **_ALL_SPARSE}, qk_layernorm=True,
    ),
    "seed_oss": _family(
        _LLAMA, {"attention_bias": "add_qkv_bias"}, {"attention_bias": True, "head_dim": 128},
        only={"attention_out_bias": False, "mlp_bias": False},
    ),
    "smollm3": _family(_LLAMA, tied=True, only=_NO_BIASES),
    "stablelm": _family(
        _LLAMA, {"use_qkv_bias": "add_qkv_bias"}, {"use_qkv_bias": False},
        only={"qk_layernorm": False, "use_parallel_residual": False}, unread=("head_dim",),
        normalization="LayerNorm",
    ),
    "starcoder2": _family(
        _NEOX, {"use_bias": "add_bias_linear"}, {"use_bias": True}, tied=True,
        only={"mlp_type": "default", "norm_type": "layer_norm"},
    ),
}  # fmt: skip
"""`model_type` -> how its config.json is read."""

OF_EVERY_FAMILY: Mapping[str, Any] = {
    "add_cross_attention": False, "is_encoder_decoder": False, "pruned_heads": {},
    "tie_encoder_decoder": False,
}  # fmt: skip
"""`only` of all families."""

SAME_KEYS = {"num_experts": "num_local_experts", "num_local_experts": "num_experts"}
"""Key of config.json -> the key that other releases of transformers write for it."""

MAY_BE_NULL = ("q_lora_rank", "n_routed_experts", "n_shared_experts", "first_k_dense_replace")
"""Keys that must be there, but may be null: the model lacks what they count."""

LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention")
"""Values in the list `layer_types` that do not change a layer's parameters."""

NO_PARAMETERS = frozenset({
    "activation_function", "architectures", "attention_dropout", "attention_multiplier",
    "attention_softmax_in_fp32", "attn_implementation", "attn_logit_softcapping", "attn_pdrop",
    "auto_map", "aux_loss_alpha", "bad_words_ids", "begin_suppress_tokens", "bos_token_id",
    "cache_implementation", "chunk_size_feed_forward", "classifier_dropout", "clip_qkv",
    "cross_attention_hidden_size", "decoder_start_token_id", "diversity_penalty", "do_sample",
    "dtype", "early_stopping", "embd_pdrop", "embedding_dropout", "embedding_multiplier",
    "encoder_no_repeat_ngram_size", "eos_token_id", "ep_size", "experts_per_token",
    "exponential_decay_length_penalty", "final_logit_softcapping", "finetuning_task",
    "forced_bos_token_id", "forced_eos_token_id", "full_attn_mod", "hidden_act",
    "hidden_activation", "hidden_dropout", "id2label", "inference_runner",
    "initial_context_length", "initializer_range", "interpolate_factor", "is_decoder", "label2id",
    "layer_norm_eps", "layer_norm_epsilon", "length_penalty", "logits_scaling", "max_batch_size",
    "max_length", "max_sequence_length", "max_window_layers", "min_length", "model_type", "n_ctx",
    "n_group", "no_repeat_ngram_size", "no_rope_layer_interval", "no_rope_layers", "norm_eps",
    "norm_epsilon", "norm_topk_prob", "num_beam_groups", "num_beams", "num_return_sequences",
    "original_max_position_embeddings", "output_attentions", "output_hidden_states",
    "output_router_logits", "output_scores", "pad_token_id", "partial_rotary_factor",
    "position_embedding_type", "pre_allocate_kv_cache", "prefix", "pretraining_tp", "problem_type",
    "quantization_config", "query_pre_attn_scalar", "remove_invalid_values",
    "reorder_and_upcast_attn", "repetition_penalty", "resid_pdrop", "residual_dropout",
    "residual_multiplier", "return_dict", "return_dict_in_generate", "rms_norm_eps",
    "rope_interleave", "rope_local_base_freq", "rope_parameters", "rope_pct", "rope_percent",
    "rope_scaling", "rope_theta", "rotary_emb_base", "rotary_pct", "routed_scaling_factor",
    "router_aux_loss_coef", "router_jitter_noise", "scale_attention_softmax_in_fp32",
    "scale_attn_by_inverse_layer_idx", "scale_attn_weights", "scoring_func", "sep_token_id",
    "seq_aux", "sliding_window", "sliding_window_pattern", "sliding_window_size",
    "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type",
    "summary_use_proj", "suppress_tokens", "swiglu_alpha", "swiglu_limit", "task_specific_params",
    "temperature", "tf_legacy_loss", "tokenizer_class", "top_k", "top_p", "topk_group",
    "topk_method", "torch_dtype", "torchscript", "transformers.js_config", "transformers_version",
    "typical_p", "unsloth_fixed", "unsloth_version", "use_bfloat16", "use_bidirectional_attention",
    "use_cache", "use_flash_attn", "use_mrope", "use_parallel_residual", "use_sliding_window",
    "validate_runner_input",
})  # fmt: skip
"""Keys that add no parameters, whatever their value."""
