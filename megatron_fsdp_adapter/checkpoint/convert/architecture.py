"""Model sizes that cannot be derived from weights, read from and written to a checkpoint's
arguments or a Hugging Face `config.json`."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from megatron_fsdp_adapter.checkpoint.convert import arguments
from megatron_fsdp_adapter.checkpoint.convert.training_state import NameStyle, TrainingState

LLAMA, MIXTRAL = "llama", "mixtral"
_CLASSES = {LLAMA: "LlamaForCausalLM", MIXTRAL: "MixtralForCausalLM"}
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    LLAMA: {"groups": None, "epsilon": 1e-6, "theta": 1e4, "positions": 2048},
    MIXTRAL: {"groups": 8, "epsilon": 1e-5, "theta": 1e6, "positions": 4096 * 32},
}
"""Defaults of `transformers` for missing fields."""

_EPSILON = ("layernorm_epsilon", "norm_epsilon")
"""The argument's name in the releases supported, and in earlier ones."""

_FACTOR = 8.0
_LLAMA3 = {
    "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip
"""Constants of core's `RotaryEmbedding` with `rope_scaling`, and its default factor."""

_WANTED: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (None, False),
    "mlp_bias": (None, False),
    "partial_rotary_factor": (None, 1),
    "quantization_config": (None,),
    "auto_map": (None,),
    "add_cross_attention": (None, False),
}
"""Field of a Hugging Face config -> values that core's models support."""


@dataclass(frozen=True)
class Architecture:
    """A Llama or a Mixtral.

    vocab: rows of the embedding; ffn: width of an MLP, in a Mixtral of one expert; rope_factor:
    factor of Llama 3's scaling of rotary frequencies, or None; experts, top_k: 0 in a Llama. Raises
    ValueError for inconsistent sizes.
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
    rope_factor: float | None = None
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

    Raises ValueError if an argument is missing or unknown, or is set to something that Llama and
    Mixtral do not have.
    """
    found = {field: value for field, (_, value) in _told(state).items()}
    missing = [name for name in ("num_attention_heads", "hidden_size")
               if state.argument(name) is None]  # fmt: skip
    if missing:
        raise ValueError(
            f"the checkpoint has no {', '.join(missing)}, which the layout of attention weights "
            "depends on. Give a Hugging Face config.json of the model with --hf-config"
        )
    args = state.rest.get("args")
    arguments.refuse_other_models(args, state.is_moe)
    arguments.refuse_unknown(args)
    factor, ignored = _factor(state)
    if ignored:
        raise ValueError(
            f"rope_scaling_factor={ignored}: Megatron-LM saves it and computes with {factor}. Give "
            "the config.json whose factor the model was trained with, with --hf-config"
        )
    hidden, heads = found["hidden"], found["heads"]
    defaults = {
        "layers": sum(name.endswith(".input_layernorm.weight") for name in state.weights),
        "query_groups": heads,
        "head_dim": hidden // heads,
        "ffn": 4 * hidden,
        "experts": 0,
        "top_k": 2 if found.get("experts") else 0,
    }
    return Architecture(
        vocab=state.weights["embedding.word_embeddings.weight"].shape[0],
        tied="output_layer.weight" not in state.weights,
        max_positions=int(
            state.argument("max_position_embeddings", state.argument("seq_length", 2048))
        ),
        **{**defaults, **found},
    )


def refuse_contradictions(state: TrainingState, model: Architecture) -> None:
    """Raises ValueError if the arguments saved in `state` contradict the architecture of a given
    config."""
    arguments.refuse_other_models(state.rest.get("args"), state.is_moe)
    wrong = [
        f"{name}={value!r} (the config: {getattr(model, field)!r})"
        for field, (name, value) in _told(state).items()
        if value != getattr(model, field)
    ]
    if wrong:
        raise ValueError(
            f"{', '.join(wrong)}: the checkpoint was saved with other arguments than the config of "
            "--hf-config has. Correct the config, or leave it out"
        )


def from_config(config: Mapping[str, Any]) -> Architecture:
    """The architecture of a Hugging Face config. Raises ValueError for another family or a missing
    field."""
    family = config.get("model_type")
    if family not in _CLASSES:
        raise ValueError(
            f"model_type={family!r} cannot be converted. Supported: {', '.join(_CLASSES)}"
        )
    rope, defaults = _rope_parameters(config), _DEFAULTS[family]
    try:
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        return Architecture(
            layers=config["num_hidden_layers"],
            hidden=hidden,
            heads=heads,
            query_groups=config.get("num_key_value_heads", defaults["groups"]) or heads,
            head_dim=config.get("head_dim") or hidden // heads,
            ffn=config["intermediate_size"],
            vocab=config["vocab_size"],
            tied=bool(config.get("tie_word_embeddings", False)),
            norm_epsilon=float(config.get("rms_norm_eps", defaults["epsilon"])),
            rotary_base=float(
                config.get("rope_theta") or rope.get("rope_theta") or defaults["theta"]
            ),
            max_positions=config.get("max_position_embeddings", defaults["positions"]),
            rope_factor=float(rope["factor"]) if rope["rope_type"] == "llama3" else None,
            experts=config["num_local_experts"] if family == MIXTRAL else 0,
            top_k=config["num_experts_per_tok"] if family == MIXTRAL else 0,
        )
    except KeyError as error:
        raise ValueError(f"the Hugging Face config has no {error.args[0]}") from error


def refuse_other_configs(config: Mapping[str, Any]) -> None:
    """Raises a ValueError that lists each field whose value core's models do not support."""
    rope = _rope_parameters(config)
    values = {"hidden_act": "silu", **config, **{k: v for k, v in rope.items() if k in _WANTED}}
    wrong = [f"{name}={values[name]!r} (not {wanted[0]!r})" for name, wanted in _WANTED.items()
             if name in values and values[name] not in wanted]  # fmt: skip
    kind = rope["rope_type"]
    if kind not in ("default", "llama3") or any(isinstance(v, Mapping) for v in rope.values()):
        wrong.append(f"rope_scaling.rope_type={kind!r} (not 'llama3')")
    if kind == "llama3":
        wrong += [f"rope_scaling.{name}={rope.get(name)!r} (not {value!r})"
                  for name, value in _LLAMA3.items() if rope.get(name) != value]  # fmt: skip
    window, positions = config.get("sliding_window"), config.get("max_position_embeddings")
    is_used = window is not None and config.get("use_sliding_window", True)
    if is_used and (positions is None or window < positions):
        wrong.append(f"sliding_window={window} (not None, or max_position_embeddings at least)")
    if wrong:
        raise ValueError(
            f"{', '.join(wrong)}: not supported by the converted model. If a field has no effect "
            "on this model, remove it from its config.json"
        )


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
        "rope_scaling": None if model.rope_factor is None else
        {"rope_type": "llama3", "factor": model.rope_factor, **_LLAMA3},
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
    """The model's training arguments, which Megatron reads from a checkpoint."""
    made = Namespace(
        num_layers=model.layers,
        hidden_size=model.hidden,
        num_attention_heads=model.heads,
        group_query_attention=model.query_groups != model.heads,
        num_query_groups=model.query_groups,
        kv_channels=model.head_dim,
        ffn_hidden_size=model.ffn,
        max_position_embeddings=model.max_positions,
        padded_vocab_size=vocab,
        **dict.fromkeys(_EPSILON, model.norm_epsilon),
        normalization="RMSNorm",
        swiglu=True,
        add_bias_linear=False,
        position_embedding_type="rope",
        rotary_base=model.rotary_base,
        use_rope_scaling=model.rope_factor is not None,
        rope_scaling_factor=_FACTOR if model.rope_factor is None else model.rope_factor,
        untie_embeddings_and_output_weights=not model.tied,
        transformer_impl="transformer_engine" if style.fused_norms else "local",
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        params_dtype=dtype,
    )
    if model.experts:
        vars(made).update(
            num_experts=model.experts,
            moe_router_topk=model.top_k,
            moe_ffn_hidden_size=model.ffn,
            moe_grouped_gemm=style.grouped_experts,
            moe_layer_freq=1,
        )
    return made


def _told(state: TrainingState) -> dict[str, tuple[str, Any]]:
    """Field of the architecture -> the saved argument that defines it, and its value."""
    get = state.argument
    of_experts = bool(get("num_experts", 0))
    one_each = get("group_query_attention") is False  # num_query_groups is a default then
    fields: dict[str, tuple[type, tuple[str, ...]]] = {
        "layers": (int, ("num_layers",)),
        "hidden": (int, ("hidden_size",)),
        "heads": (int, ("num_attention_heads",)),
        "query_groups": (int, ("num_attention_heads" if one_each else "num_query_groups",)),
        "head_dim": (int, ("kv_channels",)),
        "ffn": (int, ("moe_ffn_hidden_size",) * of_experts + ("ffn_hidden_size",)),
        "norm_epsilon": (float, _EPSILON),
        "rotary_base": (float, ("rotary_base",)),
        "experts": (int, ("num_experts",)),
        "top_k": (int, ("moe_router_topk",) * of_experts),
    }
    told: dict[str, tuple[str, Any]] = {}
    for field, (kind, names) in fields.items():
        name = next((name for name in names if get(name) is not None), None)
        if name is not None:
            told[field] = name, kind(get(name))
    factor, ignored = _factor(state)
    if get("use_rope_scaling") is not None and not ignored:
        told["rope_factor"] = "rope_scaling_factor", factor
    return told


def _factor(state: TrainingState) -> tuple[float | None, float | None]:
    """The effective factor of Llama 3's scaling (None: no scaling), and a saved factor that
    Megatron-LM ignored: it builds its GPT without it."""
    if not state.argument("use_rope_scaling", False):
        return None, None
    factor = float(state.argument("rope_scaling_factor", _FACTOR))
    # Only Megatron-LM's arguments have this name.
    is_megatron_lm = "rotary_seq_len_interpolation_factor" in arguments.entries(
        state.rest.get("args")
    )
    return (_FACTOR, factor) if is_megatron_lm and factor != _FACTOR else (factor, None)


def _rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary parameters of transformers 5 and earlier releases, under current names."""
    found = {**(config.get("rope_parameters") or {}), **(config.get("rope_scaling") or {})}
    return {**found, "rope_type": found.get("rope_type", found.get("type", "default"))}
