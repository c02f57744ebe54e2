"""A model as its units compute: parameters, operations and bytes of one microbatch on one rank.

Dense GPTs are those that `estimate` knows. Beside them mixtures of experts, and tensor, expert and
pipeline parallelism, by which each rank has a part of the layers, of their matrices and experts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from megatron_fsdp_adapter.cli.gpt import (
    ENDS_A_BLOCK,
    EVERY_RANK_HAS,
    ROOT,
    GptConfig,
    gpt_parameter_listing,
)
from megatron_fsdp_adapter.cli.quantized_options import PLAIN, Quantization
from megatron_fsdp_adapter.core.layout.format import BLOCK128, MXFP8, PER_TENSOR

from .program import Kind
from .timed_modules import EXPERTS, UnitWork, Work

DENSE, EXPERT = "dense", "expert"
BF16 = 2

LAYER_HOST = 1875.0
"""Reference microseconds in which a host launches a layer's forward, with Transformer Engine."""

MOE_HOST = 2.0
"""Times that for a layer of experts."""

FP8_HOST = 1.5
"""Times that for a layer whose products are FP8: casts are launched beside them."""

CAST_KERNELS = 12
"""Of a layer's forward or backward in FP8."""

FORWARD_PASSES, BACKWARD_PASSES = 14.0, 30.0
"""Bytes that element-wise kernels of a layer move a token, in parts of hidden + ffn elements times
2 bytes: norms, rotary embedding, SwiGLU, residuals. From a trace of Llama-3 8B layers."""
FORWARD_KERNELS, BACKWARD_KERNELS = 20, 36
PERMUTED = 12.0
"""Times that a token's hidden state is read or written, for each expert it is sent to, on the way
there and back, in one direction."""


@dataclass(frozen=True)
class Experts:
    """Of a mixture: `number` of width `ffn`, of which a token passes `topk`; `shared` width of what
    every token passes; the first `dense_layers` layers have none."""

    number: int
    topk: int
    ffn: int
    shared: int = 0
    dense_layers: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.topk <= self.number:
            raise ValueError(
                f"--moe-router-topk {self.topk}: must be from 1 to --num-experts {self.number}"
            )


@dataclass(frozen=True)
class Shape:
    """A model. gpt: what a dense layer is; experts: in place of its MLP. left_out: what the model
    has and is not counted, a line each."""

    name: str
    gpt: GptConfig
    seq_length: int
    experts: Experts | None = None
    left_out: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.seq_length < 1:
            raise ValueError(f"--seq-length {self.seq_length}: must be at least 1")

    @property
    def attention_numel(self) -> int:
        """Elements of the matrices of a layer's attention."""
        return self.gpt.attention_numel

    def mlp_numel(self, width: int) -> int:
        """Elements of the matrices of an MLP of that width."""
        return self.gpt.hidden_size * width * (3 if self.gpt.swiglu else 2)

    def is_moe(self, layer: int) -> bool:
        return self.experts is not None and layer >= self.experts.dense_layers

    def active_numel(self, layer: int) -> int:
        """Elements that a token meets in the matrices of a layer."""
        if not self.is_moe(layer):
            return self.attention_numel + self.mlp_numel(self.gpt.ffn)
        experts = self.experts
        assert experts is not None
        width = experts.topk * experts.ffn + experts.shared
        return self.attention_numel + self.mlp_numel(width)

    @property
    def vocabulary(self) -> int:
        rows = self.gpt.embedding_rows
        assert rows is not None
        return rows

    @lru_cache(maxsize=64)  # noqa: B019 - a shape is a small value, and few are made
    def step_flops(self, tokens: int) -> float:
        """As a benchmark counts them: 6 a weight that a token meets and token, causal attention;
        what is computed again is not counted."""
        layers = range(self.gpt.num_layers)
        weights = sum(self.active_numel(i) for i in layers)
        weights += self.vocabulary * self.gpt.hidden_size
        query = self.gpt.num_attention_heads * self.gpt.head_dim
        attention = 6 * len(layers) * self.seq_length * query
        return float(tokens) * (6 * weights + attention)

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters."""
        return sum(math.prod(shape) for _, _, shape, _ in listing(self, Parallel()))


@dataclass(frozen=True)
class Parallel:
    """How a model is split: over tensor, pipeline (and virtual stages), context and expert parallel
    ranks. recompute: none, or all of each layer."""

    tensor: int = 1
    pipeline: int = 1
    virtual: int = 1
    context: int = 1
    expert: int = 1
    recompute: bool = False

    def __post_init__(self) -> None:
        for name in ("tensor", "pipeline", "virtual", "context", "expert"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} parallel size {getattr(self, name)}: must be at least 1")

    def in_flight(self, stage: int, microbatches: int) -> float:
        """Microbatches whose activations a rank of a stage has at once. Of virtual stages it runs
        more forwards first, each of a part of its layers."""
        behind = self.pipeline - 1 - stage
        if self.virtual == 1:
            return min(behind + 1, microbatches)
        chunks = 2 * behind + (self.virtual - 1) * self.pipeline + 1
        return min(chunks / self.virtual, microbatches)


Row = tuple[str, str, tuple[int, ...], str]
"""Unit, name, shape and domain of a parameter."""


def listing(shape: Shape, parallel: Parallel, stage: int = 0) -> list[Row]:
    """Unit, name, shape and domain of every parameter that a rank of a pipeline stage has."""
    found: list[Row] = []
    layers = layers_of(shape, parallel, stage)
    first, last = stage == 0, stage == parallel.pipeline - 1
    for unit, fqn, full in gpt_parameter_listing(shape.gpt):
        if unit.startswith("decoder.layers."):
            number = int(unit.split(".")[2])
            if number not in layers or (shape.is_moe(number) and ".mlp." in fqn):
                continue
        elif not (last if "output" in fqn or "final" in fqn else first):
            continue
        found.append((unit, fqn, _split(fqn, full, parallel.tensor), DENSE))
    for number in layers:
        if shape.is_moe(number):
            found += _experts(shape, number, parallel)
    return sorted(found, key=lambda row: _order(row[0]))


def layers_of(shape: Shape, parallel: Parallel, stage: int) -> list[int]:
    """Numbers of the layers of a stage: as even as they can be, virtual stages joined."""
    count = shape.gpt.num_layers
    each, more = divmod(count, parallel.pipeline)
    begin = stage * each + min(stage, more)
    return list(range(begin, begin + each + (stage < more)))


def waits_for_longer(shape: Shape, parallel: Parallel, stage: int) -> float:
    """By how much longer a stage takes than its layers do, in parts of that: stages take turns, so
    each of its virtual stages takes as long as the longest of them."""
    longest = -(-(shape.gpt.num_layers - stage) // (parallel.pipeline * parallel.virtual))
    return parallel.virtual * longest / len(layers_of(shape, parallel, stage)) - 1


def _order(unit: str) -> tuple[int, int]:
    if unit.startswith("decoder.layers."):
        return 1, int(unit.split(".")[2])
    return {"embedding": (0, 0), ROOT: (2, 0)}.get(unit, (3, 0))


def _split(fqn: str, full: tuple[int, ...], tensor: int) -> tuple[int, ...]:
    """A tensor-parallel rank's part: columns of what ends a block, rows of what begins one."""
    if tensor == 1 or len(full) == 1 or fqn.endswith(EVERY_RANK_HAS):
        return full
    rows, columns = full
    if fqn.endswith(ENDS_A_BLOCK):
        return rows, -(-columns // tensor)
    return -(-rows // tensor), columns


def _experts(shape: Shape, number: int, parallel: Parallel) -> list[Row]:
    experts, hidden = shape.experts, shape.gpt.hidden_size
    assert experts is not None
    unit = f"decoder.layers.{number}"
    gate = 2 if shape.gpt.swiglu else 1
    rows: list[Row] = [
        (unit, f"{unit}.mlp.router.weight", (experts.number, hidden), DENSE)
    ]
    if experts.shared:
        width = -(-experts.shared // parallel.tensor)
        name = f"{unit}.mlp.shared_experts"
        rows.append((unit, f"{name}.linear_fc1.weight", (gate * width, hidden), DENSE))
        rows.append((unit, f"{name}.linear_fc2.weight", (hidden, width), DENSE))
    for index in range(-(-experts.number // parallel.expert)):
        name = f"{unit}.mlp.experts"
        up, down = f"{name}.linear_fc1.weight{index}", f"{name}.linear_fc2.weight{index}"
        rows.append((unit, up, (gate * experts.ffn, hidden), EXPERT))
        rows.append((unit, down, (hidden, experts.ffn), EXPERT))
    return rows


def units(
    shape: Shape, parallel: Parallel, microbatch: int, stage: int = 0,
    quantized: Quantization = PLAIN,
) -> list[UnitWork]:
    """The units of a stage's rank with their work for one microbatch of `microbatch` sequences.
    quantized: what becomes of the layers' matrix products and weights. The weights of a rank's
    experts are one parameter, which lies as they do and is planned faster."""
    params: dict[str, list[tuple[str, tuple[int, ...], str]]] = {}
    for unit, fqn, full, domain in _joined(listing(shape, parallel, stage)):
        params.setdefault(unit, []).append((fqn, full, domain))
    tokens = microbatch * shape.seq_length / parallel.context
    found = []
    head = "output_layer"
    if stage == parallel.pipeline - 1 and head not in params:  # tied: the root has the weights
        head = ROOT
    for name, mine in params.items():
        if name.startswith("decoder.layers."):
            forward, backward, host = layer_work(
                shape, parallel, tokens, int(name.split(".")[2]), quantized
            )
        elif name == head:
            forward, backward = head_work(shape, parallel, tokens)
            host = LAYER_HOST / 2
        else:
            moved = tokens * shape.gpt.hidden_size * BF16 * 2
            forward = backward = (Work(Kind.MEMORY, moved),)
            host = LAYER_HOST / 8
        reads = name != "embedding"
        found.append(UnitWork(name, tuple(mine), forward, backward, host, reads))
    return found


def _joined(rows: Sequence[Row]) -> Iterator[Row]:
    """Experts' weights of one kind, of a layer, as one."""
    seen: dict[str, list[Row]] = {}
    for row in rows:
        seen.setdefault(row[1].rstrip("0123456789") if row[3] == EXPERT else row[1], []).append(row)
    for fqn, members in seen.items():
        unit, _, (first, *others), domain = members[0]
        yield unit, fqn, (len(members) * first, *others), domain


def layer_work(
    shape: Shape, parallel: Parallel, tokens: float, number: int, quantized: Quantization
) -> tuple[tuple[Work, ...], tuple[Work, ...], float]:
    """Of a rank: forward and backward of a layer for so many tokens, and what the host takes."""
    gpt, tensor = shape.gpt, parallel.tensor
    moe = shape.is_moe(number)
    dense, grouped = _numel_of(shape, number)
    heads = gpt.num_attention_heads * gpt.head_dim / tensor
    attention = 2 * tokens * shape.seq_length * heads
    width = gpt.ffn
    if moe and shape.experts is not None:
        width = shape.experts.topk * shape.experts.ffn + shape.experts.shared
    sent = tokens * BF16 * gpt.hidden_size * (shape.experts.topk if moe and shape.experts else 0)
    moved = PERMUTED * sent / tensor
    element = tokens * BF16 * (gpt.hidden_size + width / 3) / tensor
    product, of_groups = products_of(quantized)
    forward = [
        Work(product, 2 * tokens * dense / tensor), Work(Kind.ATTENTION, attention),
        Work(of_groups, 2 * tokens * grouped / tensor),
        Work(Kind.MEMORY, FORWARD_PASSES * element + moved, kernels=FORWARD_KERNELS),
    ]  # fmt: skip
    backward = [
        Work(Kind.ATTENTION, 2.5 * attention),
        Work(of_groups, 4 * tokens * grouped / tensor),
        Work(product, 4 * tokens * dense / tensor),
        Work(Kind.MEMORY, BACKWARD_PASSES * element + moved, kernels=BACKWARD_KERNELS),
    ]  # fmt: skip
    if product is not Kind.PRODUCT:
        casts = _casts(shape, tokens / tensor, width, (dense + grouped) / tensor, quantized)
        forward.append(casts[0])
        backward.insert(0, casts[1])
    whole = tokens * gpt.hidden_size * BF16
    own: list[Work] = []
    if tensor > 1:  # with sequence parallelism: a gather and a reduction around each half
        gathered = Work(Kind.ALL_GATHER, whole, "tensor")
        own += [gathered, Work(Kind.REDUCE_SCATTER, whole, "tensor")] * 2
    if parallel.context > 1:  # keys and values of the other ranks
        kv = 2 * whole * gpt.query_groups / gpt.num_attention_heads * parallel.context
        own.append(Work(Kind.ALL_GATHER, kv / tensor, "context"))
    if moe and shape.experts is not None and parallel.expert > 1:
        own += [Work(Kind.EXCHANGE, sent / tensor, EXPERTS)] * 2
    forward += own
    backward += own
    if parallel.recompute:
        backward = forward + backward
    host = LAYER_HOST * (MOE_HOST if moe else 1.0)
    host *= FP8_HOST if product is not Kind.PRODUCT else 1.0
    return tuple(forward), tuple(backward), host


def products_of(quantized: Quantization) -> tuple[Kind, Kind]:
    """Kinds of a layer's dense and grouped products. ValueError for formats without numbers."""
    form = quantized.weights or quantized.products
    if form is None:
        return Kind.PRODUCT, Kind.GROUPED
    if form.name not in _PRODUCTS:
        raise ValueError(
            f"products of {form.name} weights: there are no numbers for them; use one of "
            f"{sorted(_PRODUCTS)}"
        )
    return _PRODUCTS[form.name], Kind.FP8_GROUPED


_PRODUCTS = {
    PER_TENSOR.name: Kind.FP8_PRODUCT, MXFP8.name: Kind.FP8_PRODUCT,
    BLOCK128.name: Kind.BLOCK_PRODUCT,
}  # fmt: skip


def _casts(
    shape: Shape, tokens: float, width: float, weights: float, quantized: Quantization
) -> tuple[Work, Work]:
    """What a layer's products read in FP8 is cast: inputs in forward, gradients of outputs in
    backward, each along rows and along columns, and weights that are kept in the compute dtype. A
    scale a tensor needs a pass before, for the largest value."""
    gpt = shape.gpt
    heads = gpt.num_attention_heads * gpt.head_dim
    kv = 2 * gpt.query_groups * gpt.head_dim
    gate = 2 if gpt.swiglu else 1
    inputs = 2 * gpt.hidden_size + heads + width
    outputs = heads + kv + 2 * gpt.hidden_size + gate * width
    form = quantized.weights or quantized.products
    passes = (BF16 if form is PER_TENSOR else 0) + BF16 + 2
    cast = weights if quantized.weights is None else 0.0
    return (
        Work(Kind.MEMORY, passes * (tokens * inputs + cast), kernels=CAST_KERNELS),
        Work(Kind.MEMORY, passes * tokens * outputs, kernels=CAST_KERNELS),
    )


def _numel_of(shape: Shape, number: int) -> tuple[int, int]:
    """Elements that a token meets in dense products of a layer, and in grouped ones."""
    if not shape.is_moe(number) or shape.experts is None:
        return shape.active_numel(number), 0
    grouped = shape.mlp_numel(shape.experts.topk * shape.experts.ffn)
    return shape.active_numel(number) - grouped, grouped


HEAD_PASSES = 62.0
"""Bytes that loss and softmax move a token and row of the vocabulary, forward and backward."""


def head_work(
    shape: Shape, parallel: Parallel, tokens: float
) -> tuple[tuple[Work, ...], tuple[Work, ...]]:
    """The output layer and the loss, in float32."""
    logits = tokens * shape.vocabulary / parallel.tensor
    products = 2 * logits * shape.gpt.hidden_size
    half = Work(Kind.MEMORY, HEAD_PASSES * logits / 2)
    return (Work(Kind.PRODUCT, products), half), (half, Work(Kind.PRODUCT, 2 * products))


def layer_bytes(
    shape: Shape, parallel: Parallel, microbatch: int, number: int = -1, fp8: bool = False
) -> float:
    """Of a rank at the end of a forward: what autograd keeps of a layer, the last unless given,
    without recomputation, with flash attention. fp8: inputs of products are kept as bytes."""
    gpt = shape.gpt
    number %= gpt.num_layers
    query = gpt.num_attention_heads * gpt.head_dim
    width = gpt.ffn
    if shape.is_moe(number) and shape.experts is not None:
        # Tokens are sent in copies, one an expert: their inputs and outputs too.
        width = shape.experts.topk * (shape.experts.ffn + 2 * gpt.hidden_size // 3)
        width += shape.experts.shared
    tokens = microbatch * shape.seq_length / parallel.context / parallel.tensor
    inputs = 2 * gpt.hidden_size + query + width if fp8 else 0
    return tokens * (BF16 * gpt.saved_numel(width) - inputs)


def captured_bytes(
    shape: Shape, parallel: Parallel, microbatch: int, in_flight: float = 1, fp8: bool = False
) -> int:
    """Of one rank: what graphs of layers reserve; of layers with experts for their attention, whose
    inputs come from elsewhere and are copied."""
    gpt = shape.gpt
    tokens = microbatch * shape.seq_length / parallel.context / parallel.tensor
    attention = tokens * BF16 * (gpt.saved_numel(0) + gpt.hidden_size)
    each = [
        attention if shape.is_moe(number) else layer_bytes(shape, parallel, microbatch, number, fp8)
        for number in layers_of(shape, parallel, 0)
    ]
    return int(sum(each) * in_flight)


@lru_cache(maxsize=4096)
def activation_bytes(
    shape: Shape, parallel: Parallel, microbatch: int, in_flight: float = 1, fp8: bool = False
) -> int:
    """Of one rank at the end of a forward: what autograd keeps of a stage's layers for `in_flight`
    microbatches, with flash attention, and the logits in bf16 and float32."""
    gpt, tensor = shape.gpt, parallel.tensor
    tokens = microbatch * shape.seq_length / parallel.context / tensor
    layers = layers_of(shape, parallel, 0)
    if parallel.recompute:
        total = tokens * BF16 * gpt.hidden_size * len(layers) * in_flight
        query = gpt.num_attention_heads * gpt.head_dim
        kv = 2 * gpt.query_groups * gpt.head_dim
        again = 4 * gpt.hidden_size + 2 * query + kv + 3 * gpt.ffn
        total += tokens * BF16 * again
    else:
        each = [layer_bytes(shape, parallel, microbatch, number, fp8) for number in layers]
        total = sum(each) * in_flight
    logits = microbatch * shape.seq_length / parallel.context * shape.vocabulary / tensor
    return int(total + (6 * logits if parallel.pipeline == 1 else 0))


def with_layers(shape: Shape, count: int) -> Shape:
    """Another number of layers, of them as many dense ones as before."""
    return replace(shape, gpt=replace(shape.gpt, num_layers=count))
