"""A dense GPT, Llama or latent-attention model as a list of parameters, from its configuration
alone; known models, and readers of configurations.

Names, shapes and order are those of megatron-core's GPTModel with the local layer spec (a test
builds that model and compares). Transformer Engine's fused layers name the norms differently, but
hold the same sizes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

ROOT, EMBEDDING = "root", "embedding"

Listing = list[tuple[str, str, tuple[int, ...]]]
"""(unit, fully qualified name, shape) of every parameter, in registration order."""

_LLAMA3 = {
    "position_embedding_type": "rope", "normalization": "RMSNorm", "swiglu": True,
    "add_bias_linear": False, "untie_embeddings_and_output_weights": True,
    "group_query_attention": True, "num_query_groups": 8, "vocab_size": 128256, "seq_length": 8192,
}  # fmt: skip
_LLAMA = {**_LLAMA3, "vocab_size": 32000, "seq_length": 4096}


def _sizes(layers: int, hidden: int, ffn: int, heads: int, **more: Any) -> dict[str, Any]:
    named = {"num_layers": layers, "hidden_size": hidden, "ffn_hidden_size": ffn}
    return {**named, "num_attention_heads": heads, **more}


PRESETS: Mapping[str, Mapping[str, Any]] = {
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
    "ffn_hidden_size": "width of the MLPs; default 4 times the model's",
    "num_attention_heads": "attention heads",
    "num_query_groups": "heads of keys and values, with grouped queries",
    "kv_channels": "width of a head; default the model's over the heads",
    "vocab_size": "tokens, before padding",
    "padded_vocab_size": "rows of the embedding",
    "make_vocab_size_divisible_by": "what the vocabulary is padded to; default 128",
    "max_position_embeddings": "learned positions",
    "seq_length": "tokens of a sequence",
    "group_query_attention": "fewer heads of keys and values than of queries",
    "swiglu": "gated MLPs",
    "add_qkv_bias": "a bias for queries, keys and values",
    "qk_layernorm": "norms of queries and keys",
    "untie_embeddings_and_output_weights": "an output layer with weights of its own",
    "normalization": "LayerNorm (the default) or RMSNorm",
    "position_embedding_type": "learned_absolute (the default) has weights, rope has none",
    "tokenizer_type": "NullTokenizer adds a token to the vocabulary",
    "num_experts": "experts of a layer",
    "moe_router_topk": "experts that a token goes to",
    "moe_ffn_hidden_size": "width of an expert",
}
"""Options of a model, for the help of commands."""

# Keys of a training preset that would change the parameters in a way this listing does not know.
_REFUSED: Mapping[str, Any] = {
    "num_experts": None,
    "mtp_num_layers": None,
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "softmax_type": "vanilla",
    "qk_l2_norm": False,
    "attention_output_gate": False,
    "experimental_attention_variant": None,
    "heterogeneous_layers_config_path": None,
}
_TYPES: Mapping[str, tuple[type, str]] = {
    "int": (int, "a whole number above 0"),
    "bool": (bool, "true or false"),
    "str": (str, "a name"),
}
TRAINING_TOKENIZER = "ByteLevelTokenizer"
"""What the training script uses if its preset names no other."""
_TOKENIZER_ROWS = {TRAINING_TOKENIZER: 256 + 1}
_TOKENIZER_EXTRA = {"NullTokenizer": 1}


@dataclass(frozen=True)
class GptConfig:
    """Megatron's options that decide which parameters a dense GPT has, with its defaults.

    Raises ValueError, naming the flag, for what makes no model.
    """

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    ffn_hidden_size: int | None = None
    group_query_attention: bool = False
    num_query_groups: int = 1
    kv_channels: int | None = None
    vocab_size: int | None = None
    padded_vocab_size: int | None = None
    make_vocab_size_divisible_by: int = 128
    tokenizer_type: str | None = None
    max_position_embeddings: int | None = None
    seq_length: int | None = None
    position_embedding_type: str = "learned_absolute"
    normalization: str = "LayerNorm"
    swiglu: bool = False
    add_bias_linear: bool = True
    add_qkv_bias: bool = False
    qk_layernorm: bool = False
    multi_latent_attention: bool = False
    q_lora_rank: int | None = None
    kv_lora_rank: int = 512
    qk_head_dim: int = 128
    qk_pos_emb_head_dim: int = 64
    v_head_dim: int = 128
    untie_embeddings_and_output_weights: bool = False

    def __post_init__(self) -> None:
        for item in fields(self):
            self._check_type(item.name, str(item.type))
        self._check_choice("normalization", ("LayerNorm", "RMSNorm"))
        # mrope and yarn have no parameters either, but need options that this listing has not.
        self._check_choice("position_embedding_type", ("learned_absolute", "rope", "none"))
        if self.kv_channels is None and self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"--num-attention-heads {self.num_attention_heads} does not divide --hidden-size "
                f"{self.hidden_size}: change one of them or give --kv-channels"
            )
        if self.num_attention_heads % self.query_groups:
            raise ValueError(
                f"--num-query-groups {self.num_query_groups} does not divide "
                f"--num-attention-heads {self.num_attention_heads}"
            )
        if self.tokenizer_type in _TOKENIZER_ROWS and self.vocab_size is not None:
            raise ValueError(
                f"--vocab-size {self.vocab_size} with --tokenizer-type {self.tokenizer_type}, "
                f"which has {_TOKENIZER_ROWS[self.tokenizer_type]}: leave one of them out"
            )
        if self.embedding_rows is None:
            raise ValueError("--vocab-size is not given: give it, or --padded-vocab-size")
        if self.position_embedding_type == "learned_absolute" and self.positions is None:
            raise ValueError(
                "--position-embedding-type learned_absolute needs --max-position-embeddings"
            )

    def _check_type(self, name: str, hint: str) -> None:
        value = getattr(self, name)
        if value is None and "None" in hint:
            return
        expected, wanted = _TYPES[hint.split(" ")[0]]
        too_small = type(value) is int and value < 1
        if type(value) is not expected or too_small:
            raise ValueError(f"{flag(name)} {value!r} must be {wanted}")

    def _check_choice(self, name: str, choices: tuple[str, ...]) -> None:
        if getattr(self, name) not in choices:
            raise ValueError(
                f"{flag(name)} {getattr(self, name)!r} is not supported: use one of {choices}"
            )

    @property
    def query_groups(self) -> int:
        """Key and value heads."""
        return self.num_query_groups if self.group_query_attention else self.num_attention_heads

    @property
    def head_dim(self) -> int:
        """Channels of one attention head, of its values if those differ."""
        if self.multi_latent_attention:
            return self.v_head_dim
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def attention_numel(self) -> int:
        """Elements of the matrices of a layer's attention."""
        return sum(
            math.prod(shape) for name, shape in _layer(self)
            if name.startswith("self_attention.linear") and len(shape) == 2
        )  # fmt: skip

    @property
    def ffn(self) -> int:
        """Width of the MLP."""
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        return default_ffn_hidden_size(self.hidden_size, self.swiglu)

    def saved_numel(self, width: int) -> int:
        """Elements that autograd keeps of a layer for each token, with flash attention and an MLP
        of that width."""
        query = self.num_attention_heads * self.head_dim
        kv = 2 * self.query_groups * self.head_dim
        return 4 * self.hidden_size + 2 * query + kv + (3 if self.swiglu else 2) * width

    @property
    def positions(self) -> int | None:
        """Rows of the position embedding."""
        return self.max_position_embeddings or self.seq_length

    @property
    def embedding_rows(self) -> int | None:
        """Rows of the word embedding: the vocabulary, padded; None if nothing tells it."""
        if self.padded_vocab_size is not None:
            return self.padded_vocab_size
        rows = _TOKENIZER_ROWS.get(self.tokenizer_type or "", self.vocab_size)
        if rows is None:
            return None
        rows += _TOKENIZER_EXTRA.get(self.tokenizer_type or "", 0)
        return padded_rows(rows, self.make_vocab_size_divisible_by)


def flag(name: str) -> str:
    """The command-line flag of an option."""
    return "--" + name.replace("_", "-")


def default_ffn_hidden_size(hidden_size: int, swiglu: bool) -> int:
    """Megatron's: if gated (three matrices, not two) 8/3 hidden, rounded down to 64."""
    return int(4 * hidden_size * 2 / 3 / 64) * 64 if swiglu else 4 * hidden_size


def padded_rows(rows: int, multiple: int) -> int:
    """Rows of an embedding, rounded up."""
    return -(-rows // multiple) * multiple


def is_linear_weight(name: str) -> bool:
    """Whether a parameter of a transformer layer is what a matrix product multiplies by."""
    return ".linear_" in name and name.rstrip("0123456789").endswith(".weight")


ENDS_A_BLOCK = ("linear_proj.weight", "linear_fc2.weight")
"""How the names of matrices end of which tensor parallelism splits the columns; of others the rows;
experts' are whole."""


EVERY_RANK_HAS = ("linear_q_down_proj.weight", "linear_kv_down_proj.weight")
"""The same of those that tensor parallelism does not split."""


def is_experts(name: str) -> bool:
    """Whether a parameter is one of an expert's, by its name."""
    return ".experts." in name


def whole_shape(name: str, shape: tuple[int, ...], tensor: int) -> tuple[int, int]:
    """Rows and columns of a matrix of which a rank of `tensor` tensor-parallel ones has `shape`."""
    rows, columns = shape
    if is_experts(name) or name.endswith(EVERY_RANK_HAS):
        return rows, columns
    return (rows, columns * tensor) if name.endswith(ENDS_A_BLOCK) else (rows * tensor, columns)


def gpt_parameter_listing(config: GptConfig) -> Listing:
    """Every parameter of the model with the unit that it belongs to.

    Transformer layers are units; so are embedding and output layer unless they share their
    weight, in which case it belongs, like the final norm, to the root unit.
    """
    tied = not config.untie_embeddings_and_output_weights
    rows = config.embedding_rows
    assert rows is not None  # checked by the configuration
    embedding = ROOT if tied else EMBEDDING
    listing: Listing = [(embedding, "embedding.word_embeddings.weight", (rows, config.hidden_size))]
    if config.position_embedding_type == "learned_absolute" and config.positions is not None:
        shape = (config.positions, config.hidden_size)
        listing.append((embedding, "embedding.position_embeddings.weight", shape))
    layer = _layer(config)
    for number in range(config.num_layers):
        unit = f"decoder.layers.{number}"
        listing += [(unit, f"{unit}.{name}", shape) for name, shape in layer]
    final = _norm("decoder.final_layernorm", config.hidden_size, config)
    listing += [(ROOT, name, shape) for name, shape in final]
    if not tied:
        listing.append(("output_layer", "output_layer.weight", (rows, config.hidden_size)))
    return listing


def _layer(config: GptConfig) -> list[tuple[str, tuple[int, ...]]]:
    hidden, dim, bias = config.hidden_size, config.head_dim, config.add_bias_linear
    query = config.num_attention_heads * dim
    qkv = query + 2 * config.query_groups * dim
    found = _norm("input_layernorm", hidden, config)
    found += _linear("self_attention.linear_proj", hidden, query, bias)
    if config.multi_latent_attention:
        found += _latent_attention(config)
    else:
        found += _linear("self_attention.linear_qkv", qkv, hidden, bias or config.add_qkv_bias)
    if config.qk_layernorm and not config.multi_latent_attention:
        found += _norm("self_attention.q_layernorm", dim, config)
        found += _norm("self_attention.k_layernorm", dim, config)
    found += _norm("pre_mlp_layernorm", hidden, config)
    found += _linear("mlp.linear_fc1", config.ffn * (2 if config.swiglu else 1), hidden, bias)
    found += _linear("mlp.linear_fc2", hidden, config.ffn, bias)
    return found


def _latent_attention(config: GptConfig) -> list[tuple[str, tuple[int, ...]]]:
    """Projections of latent attention, which have no biases: queries, keys and values by way of a
    narrow vector each, which has a norm."""
    hidden, heads, rope = config.hidden_size, config.num_attention_heads, config.qk_pos_emb_head_dim
    query, part = heads * (config.qk_head_dim + rope), "self_attention.linear"
    found: list[tuple[str, tuple[int, ...]]] = []
    norms = {"kv": config.kv_lora_rank}
    if config.q_lora_rank is None:
        found += _linear(f"{part}_q_proj", query, hidden, False)
    else:
        norms = {"q": config.q_lora_rank, **norms}
        found += _linear(f"{part}_q_down_proj", config.q_lora_rank, hidden, False)
        found += _linear(f"{part}_q_up_proj", query, config.q_lora_rank, False)
    keys = heads * (config.qk_head_dim + config.v_head_dim)
    found += _linear(f"{part}_kv_down_proj", config.kv_lora_rank + rope, hidden, False)
    found += _linear(f"{part}_kv_up_proj", keys, config.kv_lora_rank, False)
    for name, size in norms.items() if config.qk_layernorm else ():
        found += _norm(f"self_attention.{name}_layernorm", size, config)
    return found


def _norm(name: str, size: int, config: GptConfig) -> list[tuple[str, tuple[int, ...]]]:
    parts = ("weight", "bias") if config.normalization == "LayerNorm" else ("weight",)
    return [(f"{name}.{part}", (size,)) for part in parts]


def _linear(
    name: str, rows: int, columns: int, bias: bool
) -> list[tuple[str, tuple[int, ...]]]:
    weight: list[tuple[str, tuple[int, ...]]] = [(f"{name}.weight", (rows, columns))]
    return [*weight, (f"{name}.bias", (rows,))] if bias else weight


def read_preset(path: str) -> dict[Any, Any]:
    """The lines of a YAML file whose keys are Megatron's flag names, as they are written. Raises
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


def read_options(path: str) -> dict[str, Any]:
    """A preset by the names of options. Training options that do not change the parameters are left
    as they are. Raises as `read_preset`."""
    options = {str(key).replace("-", "_"): value for key, value in read_preset(path).items()}
    if "disable_bias_linear" in options:
        options["add_bias_linear"] = not options.pop("disable_bias_linear")
    return options


def model_name(path: str) -> str:
    """What a Hugging Face config, or its folder, is called: the folder's name."""
    file = Path(path).absolute()
    return (file if file.is_dir() else file.parent).name


def read_hugging_face(path: str) -> dict[str, Any]:
    """A decoder's config.json, or its folder's, by the names of Megatron's arguments.
    FileNotFoundError or ValueError, naming the file."""
    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    if not file.is_file():
        raise FileNotFoundError(f"--hf-config {file}: no such file")
    try:
        found = json.loads(file.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"--hf-config {file}: not valid JSON ({error})") from error
    found = {**found, **found.get("text_config", {})}
    missing = [name for name in _OF_HUGGING_FACE if name not in found]
    if missing:
        raise ValueError(f"--hf-config {file}: has no {', '.join(missing)}: no decoder's config")
    heads, kind = found["num_attention_heads"], str(found.get("model_type"))
    options = {
        **_LLAMA3, **{mine: found[theirs] for theirs, mine in _OF_HUGGING_FACE.items()},
        "num_query_groups": found.get("num_key_value_heads") or heads,
        "kv_channels": found.get("head_dim"),
        "untie_embeddings_and_output_weights": not found.get("tie_word_embeddings", False),
        "seq_length": min(found.get("max_position_embeddings", 4096), 8192),
        "add_qkv_bias": kind.startswith("qwen2"), "qk_layernorm": kind.startswith("qwen3"),
        "mtp_num_layers": found.get("num_nextn_predict_layers") or None,
    }  # fmt: skip
    return {**options, **_experts_of(found), **_latent_of(found)}


_OF_HUGGING_FACE = {
    "hidden_size": "hidden_size", "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_attention_heads", "intermediate_size": "ffn_hidden_size",
    "vocab_size": "vocab_size",
}  # fmt: skip


def _experts_of(found: Mapping[str, Any]) -> dict[str, Any]:
    names = ("num_local_experts", "n_routed_experts", "num_experts")
    number = next((found[name] for name in names if found.get(name)), None)
    if number is None:
        return {}
    width = found.get("moe_intermediate_size") or found["intermediate_size"]
    dense = found.get("first_k_dense_replace", 0)
    return {
        "num_experts": number, "moe_router_topk": found.get("num_experts_per_tok", 2),
        "moe_ffn_hidden_size": width,
        "moe_shared_expert_intermediate_size": (found.get("n_shared_experts") or 0) * width or None,
        "moe_layer_freq": [0] * dense + [1] * (found["num_hidden_layers"] - dense),
    }  # fmt: skip


def _latent_of(found: Mapping[str, Any]) -> dict[str, Any]:
    if not found.get("kv_lora_rank"):
        return {}
    return {
        "multi_latent_attention": True, "qk_layernorm": True, "kv_channels": None,
        "num_query_groups": found["num_attention_heads"], "q_lora_rank": found.get("q_lora_rank"),
        "kv_lora_rank": found["kv_lora_rank"], "qk_head_dim": found["qk_nope_head_dim"],
        "qk_pos_emb_head_dim": found["qk_rope_head_dim"], "v_head_dim": found["v_head_dim"],
    }  # fmt: skip


def config_from(options: Mapping[str, Any]) -> GptConfig:
    """The model among training options.

    Raises ValueError for what is missing and for what makes the model no dense GPT.
    """
    for name, neutral in _REFUSED.items():
        if options.get(name, neutral) not in (neutral, None):
            raise ValueError(
                f"{flag(name)} {options[name]!r}: the estimate knows dense models without model "
                "parallelism only; leave the option out, or use `plan`, which counts experts, "
                "tensor and pipeline parallelism"
            )
    names = {item.name for item in fields(GptConfig)}
    chosen = {name: value for name, value in options.items() if name in names}
    chosen = {name: value for name, value in chosen.items() if value is not None}
    required = ("num_layers", "hidden_size", "num_attention_heads")
    missing = [flag(name) for name in required if name not in chosen]
    if missing:
        raise ValueError(
            f"{', '.join(missing)}: not given; set on the command line, in --config or by --preset"
        )
    return GptConfig(**chosen)
