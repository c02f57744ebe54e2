"""A GPT, Llama, mixture-of-experts or latent-attention model from its configuration alone, and the
list of its parameters, whole or on one model-parallel rank.

Names, shapes and order of dense models are those of megatron-core's GPTModel with the local layer
spec (a test compares them). Transformer Engine's fused layers name the norms differently, but have
the same sizes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

ROOT = "root"
EMBEDDING = "embedding"
OUTPUT = "output_layer"
LAYERS = "decoder.layers."
DENSE = "dense"
EXPERT = "expert"

Shape = tuple[int, ...]
"""Sizes of a parameter: of the whole, or of a tensor-parallel rank's part."""

Row = tuple[str, str, Shape, str]
"""Unit, fully qualified name, shape and domain of a parameter of a rank."""

Options = Mapping[str, Any]
"""Options by Megatron's names."""

Shapes = list[tuple[str, Shape]]
"""Name and shape of each parameter of a module, before tensor parallelism splits them."""

_TYPES: Mapping[str, tuple[type, str]] = {
    "int": (int, "an integer above 0"),
    "bool": (bool, "true or false"),
    "str": (str, "a name"),
}
_TOKENIZER_EXTRA = {"NullTokenizer": 1}


@dataclass(frozen=True)
class ModelSpec:
    """Megatron's options that define a GPT's parameters and computation, with Megatron's defaults.

    Two options are not Megatron's, and describe layers of some families of Hugging Face:
    qk_layernorm_of_all_heads: the norm of queries is over all heads at once, as that of keys;
    post_layernorms: attention and MLP each have a norm behind them, too.

    These fields are no options:
    name: the model's, for reports;
    dense_layers: number of first layers that have an MLP in place of experts;
    left_out: parts of the model that are not counted, a line each.

    Raises ValueError, naming the flag, for invalid options.
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
    qk_layernorm_of_all_heads: bool = False
    post_layernorms: bool = False
    softmax_type: str = "vanilla"
    multi_latent_attention: bool = False
    q_lora_rank: int | None = None
    kv_lora_rank: int = 512
    qk_head_dim: int = 128
    qk_pos_emb_head_dim: int = 64
    v_head_dim: int = 128
    untie_embeddings_and_output_weights: bool = False
    num_experts: int | None = None
    moe_router_topk: int = 2
    moe_ffn_hidden_size: int | None = None
    moe_shared_expert_intermediate_size: int | None = None
    moe_shared_expert_gate: bool = False
    name: str = "the model"
    dense_layers: int = 0
    left_out: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for item in fields(self):
            if item.name not in _NOT_OPTIONS:
                self._check_type(item.name, str(item.type))
        choices = {
            "normalization": ("LayerNorm", "RMSNorm"),
            # mrope and yarn have no parameters either, but need options that are not listed here.
            "position_embedding_type": ("learned_absolute", "rope", "none"),
            "softmax_type": ("vanilla", "off-by-one", "learnable"),
        }
        for name, known in choices.items():
            value = getattr(self, name)
            if value not in known:
                raise ValueError(f"{flag(name)} {value!r} is not supported. Use one of {known}")
        self._check_heads()
        if not (self.padded_vocab_size or self.vocab_size):
            raise ValueError("--vocab-size is not given. Give it, or --padded-vocab-size")
        if self.position_embedding_type == "learned_absolute" and self.positions is None:
            raise ValueError(
                "--position-embedding-type learned_absolute requires --max-position-embeddings "
                "or --seq-length. Give one of them, or use rope"
            )
        if self.shared_ffn and self.add_bias_linear:
            raise ValueError(
                f"--moe-shared-expert-intermediate-size {self.shared_ffn}: Megatron's shared "
                "experts have no biases. Give --disable-bias-linear"
            )
        if self.num_experts and self.moe_router_topk > self.num_experts:
            raise ValueError(
                f"--moe-router-topk {self.moe_router_topk}: must be from 1 to --num-experts "
                f"{self.num_experts}"
            )

    def _check_heads(self) -> None:
        heads = self.num_attention_heads
        if self.kv_channels is None and self.hidden_size % heads:
            raise ValueError(
                f"--num-attention-heads {heads} does not divide --hidden-size "
                f"{self.hidden_size}. Change one of them or give --kv-channels"
            )
        if heads % self.query_groups:
            raise ValueError(
                f"--num-query-groups {self.num_query_groups} does not divide "
                f"--num-attention-heads {heads}. Change one of them"
            )

    def _check_type(self, name: str, hint: str) -> None:
        """Raises ValueError for a value of another type than the annotation `hint`, and for an
        integer below 1."""
        value = getattr(self, name)
        if value is None and "None" in hint:
            return
        expected, wanted = _TYPES[hint.split(" ")[0]]
        too_small = type(value) is int and value < 1
        if type(value) is not expected or too_small:
            raise ValueError(f"{flag(name)} {value!r} must be {wanted}")

    @property
    def query_groups(self) -> int:
        """Key and value heads."""
        if self.group_query_attention:
            return self.num_query_groups
        return self.num_attention_heads

    @property
    def head_dim(self) -> int:
        """Channels of one attention head; with latent attention, of its values."""
        if self.multi_latent_attention:
            return self.v_head_dim
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def query(self) -> int:
        """Width of all heads' queries; with latent attention, of all heads' values."""
        return self.num_attention_heads * self.head_dim

    @property
    def key_value(self) -> int:
        """Width of all keys and values together."""
        return 2 * self.query_groups * self.head_dim

    @property
    def ffn(self) -> int:
        """Width of the MLP."""
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        return default_ffn_hidden_size(self.hidden_size, self.swiglu)

    @property
    def gates(self) -> int:
        """Number of outputs, each of the MLP's width, of the MLP's first matrix: 2 if gated."""
        return 2 if self.swiglu else 1

    @property
    def expert_ffn(self) -> int:
        """Width of an expert."""
        return self.moe_ffn_hidden_size or self.ffn

    @property
    def shared_ffn(self) -> int:
        """Width of the shared expert; 0 for none."""
        return self.moe_shared_expert_intermediate_size or 0

    @property
    def positions(self) -> int | None:
        """Rows of the position embedding."""
        return self.max_position_embeddings or self.seq_length

    @property
    def tokens(self) -> int:
        """Tokens of a sequence."""
        return self.seq_length or 4096

    @property
    def embedding_rows(self) -> int:
        """Rows of the word embedding: the vocabulary, padded."""
        if self.padded_vocab_size is not None:
            return self.padded_vocab_size
        rows = (self.vocab_size or 0) + _TOKENIZER_EXTRA.get(self.tokenizer_type or "", 0)
        return padded_rows(rows, self.make_vocab_size_divisible_by)

    @property
    def attention_numel(self) -> int:
        """Elements of the matrices of a layer's attention."""
        numel = 0
        for name, shape in _attention(self):
            if name.startswith("self_attention.linear") and len(shape) == 2:
                numel += math.prod(shape)
        return numel

    def mlp_numel(self, width: int) -> int:
        """Elements of the matrices of an MLP of that width."""
        return self.hidden_size * width * (1 + self.gates)

    def is_moe(self, layer: int) -> bool:
        """True if a layer, numbered from 0, has experts."""
        return bool(self.num_experts) and layer >= self.dense_layers

    def active_ffn(self, layer: int) -> int:
        """Total MLP width that a token uses in a layer."""
        if not self.is_moe(layer):
            return self.ffn
        return self.moe_router_topk * self.expert_ffn + self.shared_ffn

    def active_numel(self, layer: int) -> int:
        """Elements of a layer's matrices that a token uses."""
        return self.attention_numel + self.mlp_numel(self.active_ffn(layer))

    def saved_numel(self, width: int) -> int:
        """Elements that autograd saves for a token in a layer with flash attention. width: of the
        MLP."""
        attention = 2 * self.query + self.key_value
        norms = 4 if self.post_layernorms else 2
        return (norms + 2) * self.hidden_size + attention + (1 + self.gates) * width

    @lru_cache(maxsize=64)  # noqa: B019 - a spec is a small value, and few are made
    def step_flops(self, tokens: int) -> float:
        """FLOPs of a step as benchmarks count them: 6 per token and used weight, plus causal
        attention, without recomputation."""
        weights = sum(self.active_numel(layer) for layer in range(self.num_layers))
        weights += self.embedding_rows * self.hidden_size
        attention = self.num_layers * self.tokens * self.query
        return float(tokens) * (6 * weights + 6 * attention)

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters."""
        return sum(math.prod(shape) for _, _, shape, _ in listing(self))


_NOT_OPTIONS = ("name", "dense_layers", "left_out")
OPTIONS = tuple(item.name for item in fields(ModelSpec) if item.name not in _NOT_OPTIONS)
"""Names of Megatron's options among the fields."""


@dataclass(frozen=True)
class Parallel:
    """Model-parallel sizes. virtual: virtual stages of each pipeline rank. recompute: True if every
    layer is recomputed in backward."""

    tensor: int = 1
    pipeline: int = 1
    virtual: int = 1
    expert: int = 1
    recompute: bool = False

    def __post_init__(self) -> None:
        for name in ("tensor", "pipeline", "virtual", "expert"):
            size = getattr(self, name)
            if size < 1:
                raise ValueError(f"{name} parallel size {size}: must be at least 1")

    @property
    def split(self) -> Parallel:
        """The sizes on which a rank's parameters depend; the others have defaults."""
        return Parallel(self.tensor, self.pipeline, expert=self.expert)

    def in_flight(self, stage: int, microbatches: int) -> float:
        """Most microbatches whose activations a rank of a stage holds at once. With virtual stages
        it is a fraction: the rank runs more forwards first, but each of a part of its layers."""
        behind = self.pipeline - 1 - stage
        if self.virtual == 1:
            return min(behind + 1, microbatches)
        chunks = 2 * behind + (self.virtual - 1) * self.pipeline + 1
        return min(chunks / self.virtual, microbatches)


WHOLE = Parallel()


def flag(name: str) -> str:
    """The command-line flag of an option."""
    return "--" + name.replace("_", "-")


def default_ffn_hidden_size(hidden_size: int, swiglu: bool) -> int:
    """Megatron's default: 4 hidden; if gated (three matrices, not two) 8/3 hidden, rounded down to
    64."""
    if swiglu:
        return int(4 * hidden_size * 2 / 3 / 64) * 64
    return 4 * hidden_size


def padded_rows(rows: int, multiple: int) -> int:
    """Rows of an embedding, rounded up to a multiple."""
    return -(-rows // multiple) * multiple


def is_layer(unit: str) -> bool:
    """True if a unit is one or several transformer layers."""
    return unit.startswith(LAYERS)


def number_of(unit: str) -> int:
    """The number of a transformer layer."""
    return int(unit.split(".")[2])


def is_linear_weight(name: str) -> bool:
    """True if a parameter, by its name, is the weight of a GEMM in a transformer layer. Weights of
    experts end in the expert's number."""
    return ".linear_" in name and name.rstrip("0123456789").endswith(".weight")


ENDS_A_BLOCK = ("linear_proj.weight", "linear_fc2.weight")
"""Suffixes of matrices whose columns tensor parallelism splits. It splits the rows of all others,
except experts' and `EVERY_RANK_HAS`."""

EVERY_RANK_HAS = (
    "linear_q_down_proj.weight", "linear_kv_down_proj.weight", "router.weight", "gate_weight",
)  # fmt: skip
"""Suffixes of matrices that tensor parallelism does not split."""


def is_experts(name: str) -> bool:
    """True if a parameter belongs to an expert, by its name."""
    return ".experts." in name


def layers_of(spec: ModelSpec, parallel: Parallel, stage: int) -> list[int]:
    """Numbers of the layers of a stage. Layers are split as evenly as possible; the first stages
    have one more. The virtual stages of a rank count as one stage."""
    each, more = divmod(spec.num_layers, parallel.pipeline)
    begin = stage * each + min(stage, more)
    return list(range(begin, begin + each + (stage < more)))


def listing(spec: ModelSpec, parallel: Parallel = WHOLE, stage: int = 0) -> list[Row]:
    """Every parameter of a rank of a pipeline stage, in registration order.

    Each transformer layer is a unit. Embedding and output layer are units if they have separate
    weights; a shared one belongs to the root unit, like the final norm.
    """
    tied = not spec.untie_embeddings_and_output_weights
    vocabulary = spec.embedding_rows
    hidden = spec.hidden_size
    embedding = ROOT if tied else EMBEDDING
    found: list[tuple[str, str, Shape]] = []
    if stage == 0:
        tables = {"word": vocabulary}
        if spec.position_embedding_type == "learned_absolute":
            tables["position"] = spec.positions or 0
        for kind, rows in tables.items():
            found.append((embedding, f"embedding.{kind}_embeddings.weight", (rows, hidden)))
    dense = _layer(spec, parallel, moe=False)
    sparse = _layer(spec, parallel, moe=True) if spec.num_experts else dense
    for number in layers_of(spec, parallel, stage):
        unit = f"{LAYERS}{number}"
        layer = sparse if spec.is_moe(number) else dense
        found += [(unit, f"{unit}.{name}", shape) for name, shape in layer]
    if stage == parallel.pipeline - 1:
        final = _norm("decoder.final_layernorm", hidden, spec)
        found += [(ROOT, name, shape) for name, shape in final]
        if not tied:
            found.append((OUTPUT, f"{OUTPUT}.weight", (vocabulary, hidden)))
    rows_of_rank = []
    for unit, fqn, shape in found:
        if is_experts(fqn):
            rows_of_rank.append((unit, fqn, shape, EXPERT))
        else:
            rows_of_rank.append((unit, fqn, _split(fqn, shape, parallel.tensor), DENSE))
    return rows_of_rank


def _split(fqn: str, full: Shape, tensor: int) -> Shape:
    """The shape of a tensor-parallel rank's part of a parameter: some columns of a matrix that ends
    a block, some rows of one that begins it. Norms and biases count as whole."""
    if tensor == 1 or len(full) == 1 or fqn.endswith(EVERY_RANK_HAS):
        return full
    rows, columns = full
    if fqn.endswith(ENDS_A_BLOCK):
        return rows, -(-columns // tensor)
    return -(-rows // tensor), columns


def _layer(spec: ModelSpec, parallel: Parallel, moe: bool) -> Shapes:
    """A transformer layer's parameters. moe: with this rank's experts, not an MLP."""
    found = _norm("input_layernorm", spec.hidden_size, spec)
    found += _attention(spec)
    found += _norm("pre_mlp_layernorm", spec.hidden_size, spec)
    if spec.post_layernorms:
        found += _norm("post_attention_layernorm", spec.hidden_size, spec)
        found += _norm("post_mlp_layernorm", spec.hidden_size, spec)
    if not moe:
        return [*found, *_mlp("mlp", spec, spec.ffn)]
    experts = spec.num_experts or 0
    found += _linear("mlp.router", experts, spec.hidden_size, spec.add_bias_linear)
    if spec.shared_ffn:
        if spec.moe_shared_expert_gate:
            found.append(("mlp.shared_experts.gate_weight", (1, spec.hidden_size)))
        found += _mlp("mlp.shared_experts", spec, spec.shared_ffn)
    expert = _mlp("mlp.experts", spec, spec.expert_ffn)
    for index in range(-(-experts // parallel.expert)):
        found += [(f"{name}{index}", shape) for name, shape in expert]
    return found


def _mlp(part: str, spec: ModelSpec, width: int) -> Shapes:
    bias = spec.add_bias_linear
    found = _linear(f"{part}.linear_fc1", width * spec.gates, spec.hidden_size, bias)
    found += _linear(f"{part}.linear_fc2", spec.hidden_size, width, bias)
    return found


def _attention(spec: ModelSpec) -> Shapes:
    hidden = spec.hidden_size
    bias = spec.add_bias_linear
    found: Shapes = []
    if spec.softmax_type == "learnable":
        found.append(("self_attention.core_attention.softmax_offset", (spec.num_attention_heads,)))
    found += _linear("self_attention.linear_proj", hidden, spec.query, bias)
    if spec.multi_latent_attention:
        return found + _latent_attention(spec)
    qkv = spec.query + spec.key_value
    found += _linear("self_attention.linear_qkv", qkv, hidden, bias or spec.add_qkv_bias)
    if spec.qk_layernorm_of_all_heads:
        found += _norm("self_attention.q_layernorm", spec.query, spec)
        found += _norm("self_attention.k_layernorm", spec.key_value // 2, spec)
    elif spec.qk_layernorm:
        found += _norm("self_attention.q_layernorm", spec.head_dim, spec)
        found += _norm("self_attention.k_layernorm", spec.head_dim, spec)
    return found


def _latent_attention(spec: ModelSpec) -> Shapes:
    """Latent attention's projections before the attention; they have no biases. Queries are
    computed from one narrow vector, keys and values from another; each vector has a norm."""
    hidden = spec.hidden_size
    heads = spec.num_attention_heads
    rope = spec.qk_pos_emb_head_dim
    query = heads * (spec.qk_head_dim + rope)
    part = "self_attention.linear"
    found: Shapes = []
    norms = {"kv": spec.kv_lora_rank}
    if spec.q_lora_rank is None:
        found += _linear(f"{part}_q_proj", query, hidden, False)
    else:
        norms = {"q": spec.q_lora_rank, **norms}
        found += _linear(f"{part}_q_down_proj", spec.q_lora_rank, hidden, False)
        found += _linear(f"{part}_q_up_proj", query, spec.q_lora_rank, False)
    keys = heads * (spec.qk_head_dim + spec.v_head_dim)
    found += _linear(f"{part}_kv_down_proj", spec.kv_lora_rank + rope, hidden, False)
    found += _linear(f"{part}_kv_up_proj", keys, spec.kv_lora_rank, False)
    if spec.qk_layernorm:
        for name, size in norms.items():
            found += _norm(f"self_attention.{name}_layernorm", size, spec)
    return found


def _norm(name: str, size: int, spec: ModelSpec) -> Shapes:
    found: Shapes = [(f"{name}.weight", (size,))]
    if spec.normalization == "LayerNorm":
        found.append((f"{name}.bias", (size,)))
    return found


def _linear(name: str, rows: int, columns: int, bias: bool) -> Shapes:
    found: Shapes = [(f"{name}.weight", (rows, columns))]
    if bias:
        found.append((f"{name}.bias", (rows,)))
    return found
