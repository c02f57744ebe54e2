"""A model as its units compute: operations and bytes of one microbatch on one rank, of a model that
may be split over tensor, expert and pipeline parallel ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

from megatron_fsdp_adapter.core.layout.format import BLOCK128, MXFP8, PER_TENSOR
from megatron_fsdp_adapter.models.quantization import PLAIN, Quantization
from megatron_fsdp_adapter.models.spec import (
    EXPERT,
    ROOT,
    ModelSpec,
    Parallel,
    Row,
    is_layer,
    layers_of,
    listing,
    number_of,
)

from .program import Kind
from .timed_modules import EXPERTS, UnitWork, Work

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


def waits_for_longer(spec: ModelSpec, parallel: Parallel, stage: int) -> float:
    """By how much longer a stage takes than its layers do, in parts of that: stages take turns, so
    each of its virtual stages takes as long as the longest of them."""
    longest = -(-(spec.num_layers - stage) // (parallel.pipeline * parallel.virtual))
    return parallel.virtual * longest / len(layers_of(spec, parallel, stage)) - 1


def _order(unit: str) -> tuple[int, int]:
    if is_layer(unit):
        return 1, number_of(unit)
    return {"embedding": (0, 0), ROOT: (2, 0)}.get(unit, (3, 0))


def units(
    spec: ModelSpec, parallel: Parallel, microbatch: int, stage: int = 0,
    quantized: Quantization = PLAIN,
) -> list[UnitWork]:
    """The units of a stage's rank with their work for one microbatch of `microbatch` sequences.
    quantized: what becomes of the layers' matrix products and weights. The weights of a rank's
    experts are one parameter, which lies as they do and is planned faster."""
    params: dict[str, list[tuple[str, tuple[int, ...], str]]] = {}
    rows = sorted(listing(spec, parallel, stage), key=lambda row: _order(row[0]))
    for unit, fqn, full, domain in _joined(rows):
        params.setdefault(unit, []).append((fqn, full, domain))
    tokens = microbatch * spec.tokens / parallel.context
    found = []
    head = "output_layer"
    if stage == parallel.pipeline - 1 and head not in params:  # tied: the root has the weights
        head = ROOT
    for name, mine in params.items():
        if is_layer(name):
            forward, backward, host = layer_work(
                spec, parallel, tokens, number_of(name), quantized
            )
        elif name == head:
            forward, backward = head_work(spec, parallel, tokens)
            host = LAYER_HOST / 2
        else:
            moved = tokens * spec.hidden_size * BF16 * 2
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
    spec: ModelSpec, parallel: Parallel, tokens: float, number: int, quantized: Quantization
) -> tuple[tuple[Work, ...], tuple[Work, ...], float]:
    """Of a rank: forward and backward of a layer for so many tokens, and what the host takes."""
    tensor, moe, width = parallel.tensor, spec.is_moe(number), spec.active_ffn(number)
    grouped = spec.mlp_numel(spec.moe_router_topk * spec.expert_ffn) if moe else 0
    dense = spec.active_numel(number) - grouped
    attention = 2 * tokens * spec.tokens * (spec.query / tensor)
    sent = tokens * BF16 * spec.hidden_size * (spec.moe_router_topk if moe else 0)
    moved = PERMUTED * sent / tensor
    element = tokens * BF16 * (spec.hidden_size + width / 3) / tensor
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
    host = LAYER_HOST * (MOE_HOST if moe else 1.0)
    if product is not Kind.PRODUCT:
        casts = _casts(spec, tokens / tensor, width, (dense + grouped) / tensor, quantized)
        forward.append(casts[0])
        backward.insert(0, casts[1])
        host *= FP8_HOST
    whole = tokens * spec.hidden_size * BF16
    own: list[Work] = []
    if tensor > 1:  # with sequence parallelism: a gather and a reduction around each half
        gathered = Work(Kind.ALL_GATHER, whole, "tensor")
        own += [gathered, Work(Kind.REDUCE_SCATTER, whole, "tensor")] * 2
    if parallel.context > 1:  # keys and values of the other ranks
        kv = 2 * whole * spec.query_groups / spec.num_attention_heads * parallel.context
        own.append(Work(Kind.ALL_GATHER, kv / tensor, "context"))
    if moe and parallel.expert > 1:
        own += [Work(Kind.EXCHANGE, sent / tensor, EXPERTS)] * 2
    forward += own
    backward = [*(forward if parallel.recompute else ()), *backward, *own]
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
    spec: ModelSpec, tokens: float, width: float, weights: float, quantized: Quantization
) -> tuple[Work, Work]:
    """What a layer's products read in FP8 is cast: inputs in forward, gradients of outputs in
    backward, each along rows and along columns, and weights that are kept in the compute dtype. A
    scale a tensor needs a pass before, for the largest value."""
    inputs = 2 * spec.hidden_size + spec.query + width
    outputs = spec.query + spec.key_value + 2 * spec.hidden_size + spec.gates * width
    form = quantized.weights or quantized.products
    passes = (BF16 if form is PER_TENSOR else 0) + BF16 + 2
    cast = weights if quantized.weights is None else 0.0
    return (
        Work(Kind.MEMORY, passes * (tokens * inputs + cast), kernels=CAST_KERNELS),
        Work(Kind.MEMORY, passes * tokens * outputs, kernels=CAST_KERNELS),
    )


HEAD_PASSES = 62.0
"""Bytes that loss and softmax move a token and row of the vocabulary, forward and backward."""


def head_work(
    spec: ModelSpec, parallel: Parallel, tokens: float
) -> tuple[tuple[Work, ...], tuple[Work, ...]]:
    """The output layer and the loss, in float32."""
    logits = tokens * spec.embedding_rows / parallel.tensor
    products = 2 * logits * spec.hidden_size
    half = Work(Kind.MEMORY, HEAD_PASSES * logits / 2)
    return (Work(Kind.PRODUCT, products), half), (half, Work(Kind.PRODUCT, 2 * products))


def _tokens(spec: ModelSpec, parallel: Parallel, microbatch: int) -> float:
    """Of a microbatch, that a rank has between products."""
    return microbatch * spec.tokens / parallel.context / parallel.tensor


def layer_bytes(
    spec: ModelSpec, parallel: Parallel, microbatch: int, number: int, fp8: bool = False
) -> float:
    """Of a rank at the end of a forward: what autograd keeps of a layer without recomputation, with
    flash attention. fp8: inputs of products are kept as bytes."""
    width = spec.ffn
    if spec.is_moe(number):
        # Tokens are sent in copies, one an expert: their inputs and outputs too.
        width = spec.moe_router_topk * (spec.expert_ffn + 2 * spec.hidden_size // 3)
        width += spec.shared_ffn
    inputs = 2 * spec.hidden_size + spec.query + width if fp8 else 0
    return _tokens(spec, parallel, microbatch) * (BF16 * spec.saved_numel(width) - inputs)


def captured_bytes(
    spec: ModelSpec, parallel: Parallel, microbatch: int, in_flight: float = 1, fp8: bool = False
) -> int:
    """Of one rank: what graphs of layers reserve; of layers with experts for their attention, whose
    inputs come from elsewhere and are copied."""
    tokens = _tokens(spec, parallel, microbatch)
    attention = tokens * BF16 * (spec.saved_numel(0) + spec.hidden_size)
    each = [
        attention if spec.is_moe(number) else layer_bytes(spec, parallel, microbatch, number, fp8)
        for number in layers_of(spec, parallel, 0)
    ]
    return int(sum(each) * in_flight)


@lru_cache(maxsize=4096)
def activation_bytes(
    spec: ModelSpec, parallel: Parallel, microbatch: int, in_flight: float = 1, fp8: bool = False
) -> int:
    """Of one rank at the end of a forward: what autograd keeps of a stage's layers for `in_flight`
    microbatches, with flash attention, and the logits in bf16 and float32."""
    tokens, layers = _tokens(spec, parallel, microbatch), layers_of(spec, parallel, 0)
    if parallel.recompute:
        total = tokens * BF16 * spec.hidden_size * len(layers) * in_flight
        again = 4 * spec.hidden_size + 2 * spec.query + spec.key_value + 3 * spec.ffn
        total += tokens * BF16 * again
    else:
        total = sum(layer_bytes(spec, parallel, microbatch, n, fp8) for n in layers) * in_flight
    logits = microbatch * spec.tokens / parallel.context * spec.embedding_rows / parallel.tensor
    return int(total + (6 * logits if parallel.pipeline == 1 else 0))
