"""The sizes of a model that weights alone do not tell, from a checkpoint's arguments or a
Hugging Face `config.json`, and the other way round."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from megatron_fsdp_adapter.checkpoint.convert.training_state import NameStyle, TrainingState

LLAMA, MIXTRAL = "llama", "mixtral"
_CLASSES = {LLAMA: "LlamaForCausalLM", MIXTRAL: "MixtralForCausalLM"}


@dataclass(frozen=True)
class Architecture:
    """A Llama or a Mixtral.

    vocab: rows of the embedding; ffn: width of an MLP, of one expert in a Mixtral; experts, top_k:
    0 in a Llama. Raises ValueError for sizes that do not fit together.
    """

    layers: int
    hidden: int
    heads: int
    query_groups: int
    head_dim: int
    ffn: int
    vocab: int
    tied: bool
    norm_epsilon: float = 1e-5
    rotary_base: float = 10000.0
    max_positions: int = 2048
    rope_scaling: Mapping[str, Any] | None = None
    experts: int = 0
    top_k: int = 0

    def __post_init__(self) -> None:
        if self.query_groups < 1 or self.heads % self.query_groups:
            raise ValueError(
                f"num_attention_heads={self.heads} is no multiple of "
                f"num_query_groups={self.query_groups}"
            )

    @property
    def family(self) -> str:
        """Hugging Face's `model_type`."""
        return MIXTRAL if self.experts else LLAMA


def from_arguments(state: TrainingState) -> Architecture:
    """The architecture by the arguments saved in `state` and its tensors' shapes.

    Raises ValueError if an argument is missing, or asks for what Llama and Mixtral do not have.
    """
    get = state.argument
    missing = [name for name in ("num_attention_heads", "hidden_size") if get(name) is None]
    if missing:
        raise ValueError(
            f"the checkpoint does not tell {', '.join(missing)}, which the layout of attention "
            "weights depends on; give a Hugging Face config.json of the model with --hf-config"
        )
    _refuse_other_models(state)
    heads, hidden = int(get("num_attention_heads")), int(get("hidden_size"))
    grouped = get("group_query_attention", get("num_query_groups") is not None)
    experts = int(get("num_experts", 0) or 0)
    embedding = state.weights["embedding.word_embeddings.weight"]
    layers = [name for name in state.weights if name.endswith(".input_layernorm.weight")]
    ffn = get("moe_ffn_hidden_size") if experts else None
    return Architecture(
        layers=len(layers),
        hidden=hidden,
        heads=heads,
        query_groups=int(get("num_query_groups", heads)) if grouped else heads,
        head_dim=int(get("kv_channels", hidden // heads)),
        ffn=int(ffn or get("ffn_hidden_size", 4 * hidden)),
        vocab=embedding.shape[0],
        tied="output_layer.weight" not in state.weights,
        norm_epsilon=float(get("norm_epsilon", 1e-5)),
        rotary_base=float(get("rotary_base", 10000)),
        max_positions=int(get("max_position_embeddings", get("seq_length", 2048))),
        rope_scaling=_scaling(get("rope_scaling_factor", 8.0)) if get("use_rope_scaling") else None,
        experts=experts,
        top_k=int(get("moe_router_topk", 2)) if experts else 0,
    )


def from_config(config: Mapping[str, Any]) -> Architecture:
    """The architecture of a Hugging Face config. ValueError if it is of another family or lacks
    a field."""
    family = config.get("model_type")
    if family not in _CLASSES:
        raise ValueError(
            f"model_type={family!r} cannot be converted; the families are {', '.join(_CLASSES)}"
        )
    try:
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        return Architecture(
            layers=config["num_hidden_layers"],
            hidden=hidden,
            heads=heads,
            query_groups=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or hidden // heads,
            ffn=config["intermediate_size"],
            vocab=config["vocab_size"],
            tied=bool(config.get("tie_word_embeddings", False)),
            norm_epsilon=config.get("rms_norm_eps", 1e-6),
            rotary_base=_rotary_base(config),
            max_positions=config.get("max_position_embeddings", 2048),
            rope_scaling=config.get("rope_scaling"),
            experts=config["num_local_experts"] if family == MIXTRAL else 0,
            top_k=config["num_experts_per_tok"] if family == MIXTRAL else 0,
        )
    except KeyError as error:
        raise ValueError(f"the Hugging Face config has no {error.args[0]}") from error


def to_config(model: Architecture, dtype: torch.dtype, vocab: int) -> dict[str, Any]:
    """A Hugging Face config for the model, with `vocab` rows of the embedding."""
    config: dict[str, Any] = {
        "architectures": [_CLASSES[model.family]],
        "model_type": model.family,
        "hidden_size": model.hidden,
        "intermediate_size": model.ffn,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.query_groups,
        "head_dim": model.head_dim,
        "vocab_size": vocab,
        "max_position_embeddings": model.max_positions,
        "rms_norm_eps": model.norm_epsilon,
        "rope_theta": model.rotary_base,
        "rope_scaling": model.rope_scaling,
        "tie_word_embeddings": model.tied,
        "hidden_act": "silu",
        "attention_bias": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
        # The ids of special tokens belong to a tokenizer, which a checkpoint does not have.
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if model.experts:
        config.update(num_local_experts=model.experts, num_experts_per_tok=model.top_k)
    return config


def to_arguments(
    model: Architecture, style: NameStyle, dtype: torch.dtype, vocab: int
) -> Namespace:
    """The training arguments of the model that Megatron reads from a checkpoint."""
    arguments = Namespace(
        num_layers=model.layers,
        hidden_size=model.hidden,
        num_attention_heads=model.heads,
        group_query_attention=model.query_groups != model.heads,
        num_query_groups=model.query_groups,
        kv_channels=model.head_dim,
        ffn_hidden_size=model.ffn,
        max_position_embeddings=model.max_positions,
        padded_vocab_size=vocab,
        norm_epsilon=model.norm_epsilon,
        normalization="RMSNorm",
        swiglu=True,
        add_bias_linear=False,
        position_embedding_type="rope",
        rotary_base=model.rotary_base,
        untie_embeddings_and_output_weights=not model.tied,
        transformer_impl="transformer_engine" if style.fused_norms else "local",
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        params_dtype=dtype,
    )
    if model.experts:
        vars(arguments).update(
            num_experts=model.experts,
            moe_router_topk=model.top_k,
            moe_ffn_hidden_size=model.ffn,
            moe_grouped_gemm=style.grouped_experts,
            moe_layer_freq=1,
        )
    return arguments


def _refuse_other_models(state: TrainingState) -> None:
    wanted = {
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "swiglu": True,
        "rotary_interleaved": False,
        "multi_latent_attention": False,
        "rotary_percent": 1.0,
    }
    found = {name: state.argument(name, value) for name, value in wanted.items()}
    wrong = [f"{name}={found[name]!r} (not {wanted[name]!r})" for name in wanted
             if found[name] != wanted[name]]  # fmt: skip
    if wrong:
        raise ValueError(f"neither a Llama nor a Mixtral: {', '.join(wrong)}")


def _scaling(factor: float) -> dict[str, Any]:
    """Llama 3's scaling with the constants that core has fixed."""
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def _rotary_base(config: Mapping[str, Any]) -> float:
    parameters = config.get("rope_parameters") or {}  # transformers 5
    return float(config.get("rope_theta") or parameters.get("rope_theta") or 10000.0)
