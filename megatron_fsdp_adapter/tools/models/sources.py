"""Sources of a model's description, for every command: known models, YAML presets, Hugging Face
configs, Megatron's options; and Megatron's options for model parallelism.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from megatron_fsdp_adapter.megatron.options import sizes

from .hugging_face import read_hugging_face
from .spec import OPTIONS, ModelSpec, Options, Parallel, flag

Flags = Mapping[str, Mapping[str, Any]]
"""Option -> the arguments of `add_argument` for its flag."""

_LLAMA3 = {
    "position_embedding_type": "rope", "normalization": "RMSNorm", "swiglu": True,
    "add_bias_linear": False, "untie_embeddings_and_output_weights": True,
    "group_query_attention": True, "num_query_groups": 8, "vocab_size": 128256, "seq_length": 8192,
}  # fmt: skip
_LLAMA = {**_LLAMA3, "vocab_size": 32000, "seq_length": 4096}


def _sizes(layers: int, hidden: int, ffn: int, heads: int, **more: Any) -> Options:
    """A model's sizes, and more options, by the names of Megatron's arguments."""
    named = {"num_layers": layers, "hidden_size": hidden, "ffn_hidden_size": ffn}
    return {**named, "num_attention_heads": heads, **more}


PRESETS: Mapping[str, Options] = {
    "llama-1.5b": {**_LLAMA3, **_sizes(16, 2048, 8192, 32), "seq_length": 2048},
    "llama3-8b": {**_LLAMA3, **_sizes(32, 4096, 14336, 32)},
    "llama-13b": {**_LLAMA, **_sizes(40, 5120, 13824, 40, num_query_groups=40)},
    "llama-30b": {**_LLAMA, **_sizes(60, 6656, 17920, 52, num_query_groups=52)},
    "llama3-70b": {**_LLAMA3, **_sizes(80, 8192, 28672, 64)},
    "llama3-405b": {**_LLAMA3, **_sizes(126, 16384, 53248, 128)},
    "mixtral-8x7b": {
        **_LLAMA, **_sizes(32, 4096, 14336, 32), "num_experts": 8, "moe_router_topk": 2,
    },
    "mixtral-8x22b": {
        **_LLAMA, **_sizes(56, 6144, 16384, 48), "num_experts": 8, "moe_router_topk": 2,
    },
    "deepseek-v3": {
        **_LLAMA, **_sizes(61, 7168, 18432, 128, num_query_groups=128), "vocab_size": 129280,
        "num_experts": 256, "moe_router_topk": 8, "moe_ffn_hidden_size": 2048,
        "moe_shared_expert_intermediate_size": 2048, "moe_layer_freq": [0] * 3 + [1] * 58,
        "multi_latent_attention": True, "q_lora_rank": 1536, "kv_lora_rank": 512,
        "qk_head_dim": 128, "qk_pos_emb_head_dim": 64, "v_head_dim": 128, "qk_layernorm": True,
    },
}  # fmt: skip
"""Known models, by the names of Megatron's arguments."""

MEANINGS: Mapping[str, str] = {
    "num_layers": "transformer layers",
    "hidden_size": "width of the model",
    "ffn_hidden_size": "width of the MLPs; default: 4 times the model's",
    "num_attention_heads": "attention heads",
    "num_query_groups": "heads of keys and values, with --group-query-attention; default: 1",
    "kv_channels": "width of a head; default: the model's over the heads",
    "vocab_size": "tokens of the vocabulary, before padding",
    "padded_vocab_size": "rows of the embedding; default: the vocabulary, padded",
    "make_vocab_size_divisible_by": "the vocabulary is padded to a multiple of it; default: 128",
    "max_position_embeddings": "learned positions; default: --seq-length",
    "seq_length": "tokens of a sequence; default: 4096",
    "group_query_attention": "fewer heads of keys and values than of queries",
    "swiglu": "gated MLPs",
    "add_qkv_bias": "a bias for queries, keys and values",
    "qk_layernorm": "norms of queries and keys",
    "untie_embeddings_and_output_weights": "an output layer with separate weights",
    "normalization": "LayerNorm or RMSNorm; default: LayerNorm",
    "position_embedding_type": (
        "learned_absolute, which has weights, rope or none; default: learned_absolute"
    ),
    "tokenizer_type": "class of the tokenizer, of which NullTokenizer adds a token; default: none",
    "num_experts": "experts of a layer; default: none, MLPs instead",
    "moe_router_topk": "experts per token; default: 2",
    "moe_ffn_hidden_size": "width of an expert; default: that of the MLPs",
}
"""Options of a model that commands have as flags, and their help."""

FILES: Flags = {
    "preset": {
        "choices": tuple(PRESETS),
        "metavar": "NAME",
        "help": f"a known model: {', '.join(PRESETS)}",
    },
    "hf_config": {"metavar": "FILE", "help": "config.json of a Hugging Face model, or its folder"},
    "config": {"metavar": "FILE", "help": "YAML with Megatron's flag names as keys"},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that describe a model. A flag that is not given is absent in the result."""
    group = parser.add_argument_group(
        "model (Megatron's flags; a flag overrides the files)", argument_default=argparse.SUPPRESS
    )
    add_flags(group, FILES)
    for item in fields(ModelSpec):
        if item.name not in MEANINGS:
            continue
        kind = str(item.type).split(" ")[0]
        form: dict[str, Any] = {"metavar": "NAME"}
        if kind == "int":
            form = {"type": int, "metavar": "N"}
        if kind == "bool":
            form = {"action": argparse.BooleanOptionalAction}
        group.add_argument(flag(item.name), help=MEANINGS[item.name], **form)
    for name, value in (("add", True), ("disable", False)):
        group.add_argument(
            f"--{name}-bias-linear",
            dest="add_bias_linear",
            action="store_const",
            const=value,
            help=f"{name} biases; default: added",
        )


def add_flags(group: Any, table: Flags) -> None:
    """Adds a flag for each option to a parser or a group of it."""
    for name, arguments in table.items():
        group.add_argument(flag(name), **arguments)


def read_preset(path: str) -> dict[Any, Any]:
    """The unmodified content of a YAML file whose keys are Megatron's flag names. Raises
    FileNotFoundError or ValueError, naming the file."""
    file = Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"--config {path}: no such file")
    try:
        content = yaml.safe_load(file.read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"--config {path}: not valid YAML ({error})") from error
    if not isinstance(content, dict):
        raise ValueError(f"--config {path}: must hold 'flag: value' lines, e.g. 'num-layers: 2'")
    return content


def read_options(path: str) -> Options:
    """The options of a preset, by names with `_`; those that do not describe the model, too. Raises
    as `read_preset`."""
    options = {str(key).replace("-", "_"): value for key, value in read_preset(path).items()}
    _check_spelling(path, options)
    if "disable_bias_linear" in options:
        options["add_bias_linear"] = not options.pop("disable_bias_linear")
    return options


ALIKE = 0.9
"""Ratio of `difflib` from which an unknown key is taken for a misspelt one. Options of Megatron
that do not describe the model are less like those that do."""


def _check_spelling(path: str, options: Options) -> None:
    """Raises ValueError for a key that is nearly that of an option of the model."""
    known = (*OPTIONS, "disable_bias_linear")
    for name in options:
        near = difflib.get_close_matches(name, known, n=1, cutoff=ALIKE)
        if near and name not in known:
            raise ValueError(
                f"--config {path}: unknown key {name}. Did you mean {near[0].replace('_', '-')}?"
            )


def options_from(given: Options) -> Options:
    """The options of a command. Each of these overrides those before it: the model named by
    `preset`, the file `hf_config`, the file `config`, the rest of `given`. Raises as the files'
    readers."""
    readers: dict[str, Callable[[str], Options]] = {
        "preset": PRESETS.__getitem__,
        "hf_config": read_hugging_face,
        "config": read_options,
    }
    options: dict[str, Any] = {}
    for name, read in readers.items():
        if given.get(name) is not None:
            options |= read(given[name])
    options |= {name: value for name, value in given.items() if name not in readers}
    return options


def name_of(given: Options) -> str:
    """The name of the model: the preset and the files that describe it."""
    parts = [str(given[name]) for name in FILES if given.get(name)]
    return " and ".join(parts) or "the model"


_REFUSED: Options = {
    "qk_l2_norm": False,
    "attention_output_gate": False,
    "experimental_attention_variant": None,
    "heterogeneous_layers_config_path": None,
}
"""Unsupported options that change the parameters, and their neutral values."""


def from_options(options: Options, name: str) -> ModelSpec:
    """The model that Megatron's options describe. name: for reports. Raises ValueError for options
    that are missing, contradict each other, or are of models that are not modeled."""
    chosen = {k: options[k] for k in OPTIONS if options.get(k) is not None}
    required = ("num_layers", "hidden_size", "num_attention_heads")
    missing = [flag(name) for name in required if name not in chosen]
    for option, neutral in _REFUSED.items():
        value = options.get(option)
        if value not in (neutral, None):
            raise ValueError(
                f"{flag(option)} {value!r}: models with it are not modeled. Leave it out"
            )
    groups = chosen.get("num_query_groups", 1)
    if groups > 1 and not options.get("group_query_attention"):
        raise ValueError(
            f"--num-query-groups {groups} without "
            "--group-query-attention, which Megatron ignores. Give both, or neither"
        )
    if missing:
        raise ValueError(
            f"{', '.join(missing)}: not given. Set on the command line, in --config or by --preset"
        )
    left_out = []
    for option, what in LEFT_OUT.items():
        if options.get(option):
            left_out.append(f"{option}={options[option]}: {what}")
    dense = 0
    if chosen.get("num_experts"):
        dense = _dense_layers(options.get("moe_layer_freq", 1), chosen["num_layers"])
    return ModelSpec(**chosen, name=name, left_out=tuple(left_out), dense_layers=dense)


LEFT_OUT = {
    "mtp_num_layers": (
        "multi-token prediction (num_nextn_predict_layers of Hugging Face), one more layer and "
        "output each; a pipeline layout needs as many m before its L"
    ),
}
"""Option of a part of the model that is not counted -> a description of the part."""


def _dense_layers(frequency: Any, layers: int) -> int:
    """The number of layers without experts, which precede all layers with experts. Raises
    ValueError for any other order."""
    if isinstance(frequency, int):
        frequency = [int(number % frequency == 0) for number in range(layers)]
    dense = layers
    is_list = isinstance(frequency, list)
    if is_list:
        dense = frequency[:layers].count(0)
    if not is_list or 0 in frequency[dense:layers]:
        raise ValueError(
            f"--moe-layer-freq {frequency}: layers without experts are supported only before "
            "all others. Leave it out"
        )
    return dense


def parallel_options(spec: ModelSpec, parallel: Parallel) -> Options:
    """Megatron's options for a model-parallel split. If the layers do not divide evenly, a pipeline
    layout takes the place of the number of virtual stages."""
    parts = parallel.pipeline * parallel.virtual
    named = {
        "tensor_model_parallel_size": parallel.tensor,
        "pipeline_model_parallel_size": parallel.pipeline,
        "num_virtual_stages_per_pipeline_rank": parallel.virtual,
        "expert_model_parallel_size": parallel.expert,
    }
    options: dict[str, Any] = {name: size for name, size in named.items() if size > 1}
    if spec.num_layers % parts:
        options.pop("num_virtual_stages_per_pipeline_rank", None)
        options[sizes.LAYOUT] = sizes.layout_of(
            spec.num_layers, parallel.pipeline, parallel.virtual
        )
    if parallel.tensor > 1:
        options["sequence_parallel"] = True
        if spec.num_experts:  # Megatron's default splits experts like the rest; here it does not
            options["expert_tensor_parallel_size"] = 1
    return options


def split_problems(
    spec: ModelSpec,
    parallel: Parallel,
    gpus: int,
    microbatch: int,
    global_batch: int,
    more: Options = MappingProxyType({}),
) -> list[str]:
    """Problems that Megatron has with a model-parallel split, a line each; empty if it has none.
    more: further options of sizes."""
    options = {
        "num_layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "num_attention_heads": spec.num_attention_heads,
        "num_query_groups": spec.query_groups,
        "kv_channels": spec.kv_channels,
        "ffn_hidden_size": spec.ffn,
        "seq_length": spec.tokens,
        "micro_batch_size": microbatch,
        "global_batch_size": global_batch,
        **parallel_options(spec, parallel),
        **more,
    }
    if spec.num_experts:
        options |= {"num_experts": spec.num_experts, "moe_ffn_hidden_size": spec.expert_ffn}
    return sizes.size_problems(options, gpus)
