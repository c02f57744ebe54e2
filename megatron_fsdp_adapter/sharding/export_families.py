"""Names of families of Hugging Face that weights are exported to, and no checkpoint is converted
to: Qwen2, Qwen3, Qwen3-MoE and DeepSeek-V3, each a Llama with other layers.

    decoder.layers.N.                        model.layers.N.
      self_attention.linear_qkv.bias           self_attn.{q,k,v}_proj.bias
      self_attention.{q,k}_layernorm.weight    self_attn.{q,k}_norm.weight
      mlp.router.weight                        mlp.gate.weight
      mlp.router.expert_bias                   mlp.gate.e_score_correction_bias
      mlp.experts.E.linear_fc1.weight          mlp.experts.E.{gate,up}_proj.weight
      mlp.shared_experts.linear_fc1.weight     mlp.shared_experts.{gate,up}_proj.weight
    latent attention:
      self_attention.linear_q_down_proj.weight   self_attn.q_a_proj.weight
      self_attention.linear_kv_up_proj.weight    self_attn.kv_b_proj.weight

Gemma was turned down: whether a norm's weight is stored around 0 or around 1 is told by the model's
configuration alone, and a wrong guess is no error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..checkpoint.convert import architecture
from ..checkpoint.convert.architecture import Architecture
from ..checkpoint.convert.hugging_face import names_of

Names = dict[str, tuple[str, ...]]
Config = Mapping[str, Any]

_DENSE: Names = {
    "mlp.linear_fc1.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.linear_fc2.weight": ("mlp.down_proj.weight",),
}
_QKV_BIAS: Names = {
    "self_attention.linear_qkv.bias": tuple(f"self_attn.{part}_proj.bias" for part in "qkv")
}
_QK_NORMS: Names = {
    f"self_attention.{part}_layernorm.weight": (f"self_attn.{part}_norm.weight",) for part in "qk"
}
_LATENT_QUERY: Names = {
    "self_attention.linear_q_down_proj.weight": ("self_attn.q_a_proj.weight",),
    "self_attention.q_layernorm.weight": ("self_attn.q_a_layernorm.weight",),
    "self_attention.linear_q_up_proj.layer_norm_weight": ("self_attn.q_a_layernorm.weight",),
    "self_attention.linear_q_up_proj.weight": ("self_attn.q_b_proj.weight",),
}
_WHOLE_QUERY: Names = {"self_attention.linear_q_proj.weight": ("self_attn.q_proj.weight",)}
_LATENT_KEY: Names = {
    "self_attention.linear_kv_down_proj.weight": ("self_attn.kv_a_proj_with_mqa.weight",),
    "self_attention.kv_layernorm.weight": ("self_attn.kv_a_layernorm.weight",),
    "self_attention.linear_kv_up_proj.layer_norm_weight": ("self_attn.kv_a_layernorm.weight",),
    "self_attention.linear_kv_up_proj.weight": ("self_attn.kv_b_proj.weight",),
}
_QKV = "self_attention.linear_qkv.weight"


def _experts(number: int) -> Names:
    found: Names = {"mlp.router.weight": ("mlp.gate.weight",)}
    for expert in range(number):
        for ours, theirs in _DENSE.items():
            inside = (name.replace("mlp.", f"mlp.experts.{expert}.", 1) for name in theirs)
            found[ours.replace("mlp.", f"mlp.experts.{expert}.", 1)] = tuple(inside)
    return found


_SHARED_AND_BIAS: Names = {
    "mlp.router.expert_bias": ("mlp.gate.e_score_correction_bias",),
    **{
        ours.replace("mlp.", "mlp.shared_experts.", 1): tuple(
            name.replace("mlp.", "mlp.shared_experts.", 1) for name in theirs
        )
        for ours, theirs in _DENSE.items()
    },
}


def _qwen3_moe(config: Config, layer: int) -> Names:
    is_dense = layer in (config.get("mlp_only_layers") or ()) or (
        (layer + 1) % config.get("decoder_sparse_step", 1) != 0
    )
    count = "num_local_experts" if "num_local_experts" in config else "num_experts"  # 5.x, hub
    return {**_QK_NORMS, **(_DENSE if is_dense else _experts(config[count]))}


def _deepseek_v3(config: Config, layer: int) -> Names:
    query = _WHOLE_QUERY if config.get("q_lora_rank") is None else _LATENT_QUERY
    if layer < config["first_k_dense_replace"]:
        return {**query, **_LATENT_KEY, **_DENSE}
    return {**query, **_LATENT_KEY, **_experts(config["n_routed_experts"]), **_SHARED_AND_BIAS}


FAMILIES: Mapping[str, tuple[Callable[[Config, int], Names], tuple[str, ...]]] = {
    "qwen2": (lambda config, layer: {**_DENSE, **_QKV_BIAS}, ()),
    "qwen3": (lambda config, layer: {**_DENSE, **_QK_NORMS}, ()),
    "qwen3_moe": (_qwen3_moe, ()),
    "deepseek_v3": (_deepseek_v3, (_QKV,)),
}
"""`model_type` -> what a layer of that number has beside a Llama's attention and norms, or in place
of its MLP; and what of those it has not."""


def architecture_and_names(config: Config) -> tuple[Architecture, Mapping[str, tuple[str, ...]]]:
    """Of a config of Hugging Face: sizes, and Hugging Face's names by ours. ValueError if it is of
    another family or lacks a field."""
    family = str(config.get("model_type"))
    if family not in FAMILIES:
        try:
            model = architecture.from_config(config)
        except ValueError as error:
            raise ValueError(f"{error}; exported are also {', '.join(FAMILIES)}") from None
        return model, names_of(model)
    model = architecture.from_config({**config, "model_type": architecture.LLAMA})
    layer_of, without = FAMILIES[family]
    dropped = {*_DENSE, *without}
    names = {ours: theirs for ours, theirs in names_of(model).items()
             if ours.removeprefix("decoder.layers.").partition(".")[2] not in dropped}  # fmt: skip
    try:
        layers = [layer_of(config, layer) for layer in range(model.layers)]
    except KeyError as error:
        raise ValueError(f"the Hugging Face config has no {error.args[0]}") from error
    for number, inside in enumerate(layers):
        for ours, theirs in inside.items():
            names[f"decoder.layers.{number}.{ours}"] = tuple(
                f"model.layers.{number}.{name}" for name in theirs
            )
    return model, names
