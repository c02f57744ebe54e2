"""Shapes from what users have: Megatron's options, or a Hugging Face config."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_fsdp_adapter.cli.gpt import GptConfig, config_from
from megatron_fsdp_adapter.megatron.options import sizes

from .shapes import Experts, Parallel, Shape

_KNOWN = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "num_experts")
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
        )  # fmt: skip
    return Shape(name, gpt, options.get("seq_length") or 4096, experts)


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
    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    if not file.is_file():
        raise FileNotFoundError(f"--hf-config {file}: no such file")
    try:
        found = json.loads(file.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"--hf-config {path}: not valid JSON ({error})") from error
    found = {**found, **found.get("text_config", {})}
    needed = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
              "vocab_size")  # fmt: skip
    missing = [name for name in needed if name not in found]
    if missing:
        raise ValueError(f"--hf-config {path}: has no {', '.join(missing)}: no decoder's config")
    heads = found["num_attention_heads"]
    gpt = GptConfig(
        num_layers=found["num_hidden_layers"], hidden_size=found["hidden_size"],
        num_attention_heads=heads, ffn_hidden_size=found["intermediate_size"],
        group_query_attention=True, num_query_groups=found.get("num_key_value_heads") or heads,
        kv_channels=found.get("v_head_dim") or found.get("head_dim"),
        vocab_size=found["vocab_size"], position_embedding_type="rope", normalization="RMSNorm",
        swiglu=True, add_bias_linear=False,
        untie_embeddings_and_output_weights=not found.get("tie_word_embeddings", False),
    )  # fmt: skip
    number = found.get("num_local_experts") or found.get("n_routed_experts") or found.get(
        "num_experts"
    )
    experts = None
    if number:
        width = found.get("moe_intermediate_size") or found["intermediate_size"]
        experts = Experts(
            number, found.get("num_experts_per_tok", 2), width,
            (found.get("n_shared_experts") or 0) * width, found.get("first_k_dense_replace", 0),
        )  # fmt: skip
    name = found.get("_name_or_path") or file.parent.name or found.get("model_type", "the model")
    longest = min(found.get("max_position_embeddings", 4096), 8192)
    left_out = tuple(
        f"{option}={found[option]}: {what}"
        for option, what in LEFT_OUT.items() if found.get(option)
    )
    return Shape(str(name), gpt, longest, experts, _latent(found), left_out)


LEFT_OUT = {
    "num_nextn_predict_layers": "multi-token prediction, one more layer and output each; to train "
    "it give --mtp-num-layers, and a layout an m in front of its L",
}
"""Options of Hugging Face whose part of the model is not planned."""


def _latent(found: Mapping[str, Any]) -> int:
    """Elements of the matrices of latent attention; 0 for any other."""
    rank = found.get("kv_lora_rank")
    if not rank:
        return 0
    hidden, heads = found["hidden_size"], found["num_attention_heads"]
    nope, rope, value = (
        found[name] for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    query = heads * (nope + rope)
    lora = found.get("q_lora_rank")
    queries = hidden * query if not lora else hidden * lora + lora * query
    kv = hidden * (rank + rope) + rank * heads * (nope + value)
    return int(queries + kv + heads * value * hidden)
