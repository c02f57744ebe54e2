"""Shapes from what users have: Megatron's options, or a Hugging Face config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_fsdp_adapter.cli.gpt import PRESETS, config_from, model_name, read_hugging_face
from megatron_fsdp_adapter.megatron.options import sizes

from .shapes import Experts, Parallel, Shape

_KNOWN = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "num_experts", "mtp_num_layers",
)  # fmt: skip
"""What `estimate` refuses, and a plan knows or chooses itself."""

_LLAMA = {"position_embedding_type": "rope", "normalization": "RMSNorm", "swiglu": True,
          "add_bias_linear": False}  # fmt: skip
"""Of a model that only flags of sizes describe."""


def from_options(options: Mapping[str, Any], name: str) -> Shape:
    """Megatron's options, by the names of arguments. ValueError for what makes no GPT."""
    sizes = {key: value for key, value in options.items() if key not in _KNOWN}
    if "position_embedding_type" not in sizes:
        sizes = {**_LLAMA, **sizes}
    if sizes.get("vocab_size") is None and sizes.get("padded_vocab_size") is None:
        raise ValueError("--vocab-size is not given: give it, --preset or --hf-config")
    if sizes.get("num_query_groups"):
        sizes["group_query_attention"] = True
    gpt = config_from(sizes)
    experts = None
    if options.get("num_experts"):
        experts = Experts(
            options["num_experts"], options.get("moe_router_topk", 2),
            options.get("moe_ffn_hidden_size") or gpt.ffn,
            options.get("moe_shared_expert_intermediate_size") or 0,
            _dense_layers(options.get("moe_layer_freq", 1), gpt.num_layers),
        )  # fmt: skip
    left_out = tuple(
        f"{option}={options[option]}: {what}"
        for option, what in LEFT_OUT.items() if options.get(option)
    )  # fmt: skip
    return Shape(name, gpt, options.get("seq_length") or 4096, experts, left_out)


LEFT_OUT = {
    "mtp_num_layers": "multi-token prediction (num_nextn_predict_layers of Hugging Face), a layer "
    "and an output more each; a layout needs as many m in front of its L",
}
"""Options whose part of a model is not planned."""


def _dense_layers(frequency: Any, layers: int) -> int:
    """Layers without experts in front of all with. ValueError for any other order."""
    if isinstance(frequency, int):
        frequency = [int(number % frequency == 0) for number in range(layers)]
    dense = list(frequency[:layers]).count(0) if isinstance(frequency, list) else layers
    if not isinstance(frequency, list) or any(number == 0 for number in frequency[dense:layers]):
        raise ValueError(
            f"--moe-layer-freq {frequency}: a plan knows layers without experts in front of all "
            "others only; leave it out"
        )
    return dense


def shape_named(name: str) -> Shape:
    """A known model. ValueError lists their names."""
    if name not in PRESETS:
        raise ValueError(f"--preset {name!r} is unknown: use one of {sorted(PRESETS)}")
    return from_options(PRESETS[name], name)


def parallel_options(shape: Shape, parallel: Parallel) -> dict[str, Any]:
    """Megatron's options that split a model so. Stages of different numbers of layers have a
    layout."""
    parts = parallel.pipeline * parallel.virtual
    named = {
        "tensor_model_parallel_size": parallel.tensor,
        "pipeline_model_parallel_size": parallel.pipeline,
        "num_virtual_stages_per_pipeline_rank": parallel.virtual,
        "context_parallel_size": parallel.context,
        "expert_model_parallel_size": parallel.expert,
    }
    options: dict[str, Any] = {name: size for name, size in named.items() if size > 1}
    if shape.gpt.num_layers % parts:
        options.pop("num_virtual_stages_per_pipeline_rank", None)
        options[sizes.LAYOUT] = sizes.layout_of(
            shape.gpt.num_layers, parallel.pipeline, parallel.virtual
        )
    if parallel.tensor > 1:
        options["sequence_parallel"] = True
        if shape.experts is not None:  # Megatron splits experts like the rest unless told
            options["expert_tensor_parallel_size"] = 1
    return options


def split_problems(
    shape: Shape, parallel: Parallel, gpus: int, microbatch: int, global_batch: int
) -> list[str]:
    """Why Megatron would not run the model split so, one line each."""
    gpt, experts = shape.gpt, shape.experts
    options = {
        "num_layers": gpt.num_layers, "hidden_size": gpt.hidden_size,
        "num_attention_heads": gpt.num_attention_heads, "num_query_groups": gpt.query_groups,
        "kv_channels": gpt.kv_channels, "ffn_hidden_size": gpt.ffn,
        "seq_length": shape.seq_length, "micro_batch_size": microbatch,
        "global_batch_size": global_batch, **parallel_options(shape, parallel),
    }  # fmt: skip
    if experts is not None:
        options |= {"num_experts": experts.number, "moe_ffn_hidden_size": experts.ffn}
    return sizes.size_problems(options, gpus)


def from_hugging_face(path: str) -> Shape:
    """A decoder's config.json, or its folder. FileNotFoundError or ValueError, naming the file."""
    return from_options(read_hugging_face(path), model_name(path))
