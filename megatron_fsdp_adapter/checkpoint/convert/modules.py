"""The modules that conversions know, and weights that `torch_dist` stores in parts.

A name that no row has belongs to a module whose names in the other format are not known: it may be
stored in parts, under another name, or only on some ranks. So a checkpoint with such a name is
refused. `tests/checkpoint/convert/test_convert_modules.py` builds every model that core's layer
specs describe, and compares these tables with what core saves of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from megatron_fsdp_adapter.checkpoint.convert.lazy import LazyTensor, Tensors, concat, narrow
from megatron_fsdp_adapter.core.layout.ranges import Shape

# A block of layers with separate keys, and one layer. Common names; a stack of a hybrid model may
# lie in a layer of multi-token prediction.
_BLOCK = r"(?:encoder|decoder|mtp\.layers\.\d+\.mtp_model_layer)"
LAYER = rf"{_BLOCK}\.layers\.\d+|mtp\.layers\.\d+\.transformer_layer"

_LINEAR = ("weight", "bias")
_NORM = ("weight", "bias")
_NORM_AND_LINEAR = ("weight", "bias", "layer_norm_weight", "layer_norm_bias")

# fmt: off
MODEL_MODULES: Mapping[str, tuple[str, ...]] = {
    r"embedding\.(word|position|tokentype)_embeddings": ("weight",),
    r"position_embeddings": ("weight",),
    r"(encoder|decoder)_relative_pos_emb\.relative_attention_bias": ("weight",),
    rf"{_BLOCK}\.(final_layernorm|final_norm)": _NORM,
    r"mtp\.layers\.\d+\.(enorm|hnorm|final_layernorm)": _NORM,
    r"mtp\.layers\.\d+\.eh_proj": _LINEAR,
    r"(lm_head\.)?output_layer": _LINEAR,
    r"lm_head\.dense|pooler\.dense|binary_head": _LINEAR,
    r"lm_head\.layer_norm": _NORM,
}
"""Modules beside the layers -> the last words of their parameters."""

LAYER_MODULES: Mapping[str, tuple[str, ...]] = {
    r"(input|pre_mlp|pre_cross_attn)_layernorm|norm": _NORM,
    r"self_attention\.linear_(qkv|q_proj|q_down_proj|kv_down_proj|proj)": _LINEAR,
    r"self_attention\.linear_(q|kv)_up_proj": _NORM_AND_LINEAR,
    r"self_attention\.(q|k|kv)_layernorm": _NORM,
    r"self_attention\.core_attention": ("softmax_offset",),
    r"self_attention\.core_attention\.indexer\.linear_(wq_b|wk|weights_proj)": _LINEAR,
    r"self_attention\.core_attention\.indexer\.k_norm": _NORM,
    r"cross_attention\.linear_(q|kv|proj)": _LINEAR,
    r"cross_attention\.core_attention": ("softmax_offset",),
    r"self_attention": ("A_log", "dt_bias"),
    r"self_attention\.in_proj": _NORM_AND_LINEAR,
    r"self_attention\.(out_proj|conv1d)": _LINEAR,
    r"self_attention\.out_norm": _NORM,
    r"mixer": ("A_log", "D", "dt_bias"),
    r"mixer\.in_proj": _NORM_AND_LINEAR,
    r"mixer\.(out_proj|conv1d)": _LINEAR,
    r"mixer\.norm": _NORM,
    r"mlp\.linear_fc[12]": _LINEAR,
    r"mlp\.router": ("weight", "bias"),
    r"mlp\.experts\.\d+\.linear_fc[12]": _LINEAR,
    r"mlp\.shared_experts\.linear_fc[12]": _LINEAR,
    r"mlp\.shared_experts": ("gate_weight",),
    r"mlp\.fc[12]_latent_proj": _LINEAR,
}
"""Modules inside a layer -> the last words of their parameters."""

BUFFERS: Mapping[str, tuple[str, ...]] = {
    r"mlp\.router": ("expert_bias", "qb_beta"),
}
"""Modules inside a layer -> the last words of their persistent buffers, which keep their dtype."""

PARTS: Mapping[str, tuple[str, ...]] = {
    "mixer.in_proj.weight": ("z", "x", "B", "C", "dt"),
    "mixer.conv1d.weight": ("x", "B", "C"),
    "mixer.conv1d.bias": ("x", "B", "C"),
    "self_attention.in_proj.weight": ("query", "key", "value", "z", "beta", "alpha"),
    "self_attention.conv1d.weight": ("query", "key", "value"),
    "self_attention.conv1d.bias": ("query", "key", "value"),
}
"""Weights of Mamba and of gated delta nets -> the last words of the keys that `torch_dist` has for
their rows, in order."""
SHARED: Mapping[str, str] = {
    "position_embeddings.weight": "embedding.position_embeddings.weight",
    "output_layer.weight": "lm_head.output_layer.weight",
    "output_layer.bias": "lm_head.output_layer.bias",
}
"""T5 has two names for these parameters. Both are stored with the weights; the optimizer's state is
stored under the first one in `torch_dist`, and under the second one in `fsdp_dtensor`."""
# fmt: on


def _rows(modules: Mapping[str, tuple[str, ...]]) -> str:
    return "|".join(rf"(?:{path})\.(?:{'|'.join(words)})" for path, words in modules.items())


_KNOWN = re.compile(
    rf"(?:{_rows(MODEL_MODULES)})|(?:{LAYER})\.(?:{_rows(LAYER_MODULES)}|{_rows(BUFFERS)})"
)
_BUFFER = re.compile(rf"(?:{LAYER})\.(?:{_rows(BUFFERS)})")
_PART = re.compile(rf"((?:{LAYER})\.(?:{'|'.join(map(re.escape, PARTS))}))\.(\w+)")
_OF_LAYER = re.compile(rf"({LAYER})\.(.+)")


def is_buffer(name: str) -> bool:
    """True if `name` (common) is a persistent buffer, such as a router's `expert_bias`."""
    return bool(_BUFFER.fullmatch(name))


def in_layer(name: str) -> tuple[str, str]:
    """Path of the layer and the rest of `name` (common); ("", name) for a name of no layer."""
    match = _OF_LAYER.fullmatch(name)
    return (match[1], match[2]) if match else ("", name)


def check_known(names: Iterable[str], where: object) -> None:
    """Raises ValueError if a name (common) belongs to no known module."""
    unknown = sorted(name for name in names if not _KNOWN.fullmatch(name))
    if unknown:
        more = f", and {len(unknown) - 3} more" if len(unknown) > 3 else ""
        raise ValueError(
            f"{where}: no conversion is known for {', '.join(unknown[:3])}{more}. docs/convert.md "
            "lists the modules that are converted. Carry the weights over through Hugging Face "
            "files (docs/bridge.md)"
        )


def join_parts(tensors: Tensors) -> Tensors:
    """The tensors with those of `PARTS` joined. Raises ValueError if one of the parts is missing or
    unknown."""
    joined: Tensors = {}
    parts: dict[str, Tensors] = {}
    for name, tensor in tensors.items():
        if match := _PART.fullmatch(name):
            parts.setdefault(match[1], {})[match[2]] = tensor
        else:
            joined[name] = tensor
    for name, found in parts.items():
        words = PARTS[in_layer(name)[1]]
        if found.keys() != set(words):
            raise ValueError(
                f"{name} is stored in the parts {', '.join(sorted(found))}. Only a layer with the "
                f"parts {', '.join(words)} can be converted"
            )
        joined[name] = concat([found[word] for word in words])
    return joined


def split_parts(name: str, tensor: LazyTensor, shapes: Mapping[str, Shape]) -> Tensors:
    """Suffix of the key -> rows of the tensor, or {"": tensor} for a weight without parts.

    shapes: of all weights, by common name. Raises ValueError if the sizes of the parts do not add
    up to the weight, as in a layer of a kind that is not known."""
    layer, inside = in_layer(name)
    words = PARTS.get(inside)
    if words is None:
        return {"": tensor}
    mixer = f"{layer}.{inside.split('.')[0]}"
    sizes = _part_sizes(mixer, shapes)
    if sum(sizes.get(word, 0) for word in words) != tensor.shape[0]:
        raise ValueError(
            f"{name} has {tensor.shape[0]} rows, which are not those of the parts "
            f"{', '.join(words)}. Only Mamba and gated delta net layers can be converted"
        )
    found: Tensors = {}
    start = 0
    for word in words:
        found[f".{word}"] = narrow(tensor, start, sizes[word])
        start += sizes[word]
    return found


def _part_sizes(mixer: str, shapes: Mapping[str, Shape]) -> dict[str, int]:
    """Part -> its number of rows, for the Mamba mixer or gated delta net at the path `mixer`.

    The output projection reads one value per inner channel, A_log has one per head, and the
    convolution runs over the inner channels and two more parts of equal size. {} if a weight is
    missing."""
    names = (f"{mixer}.out_proj.weight", f"{mixer}.A_log", f"{mixer}.conv1d.weight")
    if not all(name in shapes for name in names):
        return {}
    projection, heads, convolution = (shapes[name] for name in names)
    inner = projection[1]
    one_of_two, odd = divmod(convolution[0] - inner, 2)
    if odd:
        return {}
    if mixer.endswith(".mixer"):
        if f"{mixer}.D" not in shapes:  # not Mamba, but a layer in its place
            return {}
        return {"z": inner, "x": inner, "B": one_of_two, "C": one_of_two, "dt": heads[0]}
    return {
        "query": one_of_two,
        "key": one_of_two,
        "value": inner,
        "z": inner,
        "beta": heads[0],
        "alpha": heads[0],
    }
