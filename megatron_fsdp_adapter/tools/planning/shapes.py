"""Work of a model's units: operations and bytes of one microbatch on one rank, with tensor, expert
and pipeline parallelism.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

from megatron_fsdp_adapter.core.layout.ranges import Shape
from megatron_fsdp_adapter.tools.models.spec import (
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

from .program import Kind, Operation
from .timed_modules import EXPERTS, UnitWork, Work

BF16 = 2

LAYER_HOST = 1875.0
"""Reference microseconds to launch a layer's forward, with Transformer Engine."""

MOE_HOST = 2.0
"""Factor of `LAYER_HOST` for a layer with experts."""

FORWARD_PASSES = 14.0
BACKWARD_PASSES = 30.0
"""Memory traffic per token of a layer's element-wise kernels (norms, rotary embedding, SwiGLU,
residuals), in units of 2 (hidden + ffn / 3) bytes. From a trace of Llama-3 8B layers."""
FORWARD_KERNELS = 20
BACKWARD_KERNELS = 36
PERMUTED = 12.0
"""Number of reads and writes of a token's hidden state for dispatch and combine, for each of its
experts, in forward and again in backward."""


def waits_for_longer(spec: ModelSpec, parallel: Parallel, stage: int) -> float:
    """Time that a stage waits, relative to that of its layers. Stages take turns, so each virtual
    stage takes as long as the longest."""
    longest = -(-(spec.num_layers - stage) // (parallel.pipeline * parallel.virtual))
    return parallel.virtual * longest / len(layers_of(spec, parallel, stage)) - 1


def _order(unit: str) -> tuple[int, int]:
    """The sort key of units in the order of computation; the output layer is last."""
    if is_layer(unit):
        return 1, number_of(unit)
    return {"embedding": (0, 0), ROOT: (2, 0)}.get(unit, (3, 0))


def units(spec: ModelSpec, parallel: Parallel, microbatch: int, stage: int = 0) -> list[UnitWork]:
    """The units of a stage's rank with their work for one microbatch of `microbatch` sequences.

    The weights of a rank's experts are joined into one parameter. Its layout is the same, and is
    planned faster."""
    params: dict[str, list[tuple[str, Shape, str]]] = {}
    rows = sorted(listing(spec, parallel, stage), key=lambda row: _order(row[0]))
    for unit, fqn, shape, domain in _with_joined_experts(rows):
        params.setdefault(unit, []).append((fqn, shape, domain))
    tokens = microbatch * spec.tokens
    found = []
    head = "output_layer"
    if stage == parallel.pipeline - 1 and head not in params:  # tied: the root has the weights
        head = ROOT
    for name, mine in params.items():
        if is_layer(name):
            forward, backward, host = layer_work(spec, parallel, tokens, number_of(name))
        elif name == head:
            forward, backward = head_work(spec, parallel, tokens)
            host = LAYER_HOST / 2
        else:
            forward = (Work(Kind.MEMORY, tokens * spec.hidden_size * BF16 * 2),)
            backward = forward
            host = LAYER_HOST / 8
        reads = name != "embedding"
        found.append(UnitWork(name, tuple(mine), forward, backward, host, reads))
    return found


def _with_joined_experts(rows: Sequence[Row]) -> Iterator[Row]:
    """The rows, but one for the same weight of all experts of a layer."""
    by_name: dict[str, list[Row]] = {}
    for row in rows:
        _, fqn, _, domain = row
        name = fqn.rstrip("0123456789") if domain == EXPERT else fqn
        by_name.setdefault(name, []).append(row)
    for fqn, members in by_name.items():
        unit, _, (first, *others), domain = members[0]
        yield unit, fqn, (len(members) * first, *others), domain


def layer_work(
    spec: ModelSpec, parallel: Parallel, tokens: float, number: int
) -> tuple[tuple[Operation, ...], tuple[Operation, ...], float]:
    """A rank's work in forward and in backward of layer `number` for `tokens` tokens, and
    microseconds of the host for its forward."""
    tensor = parallel.tensor
    hidden = spec.hidden_size
    moe = spec.is_moe(number)
    copies = 0  # of a token, for its experts
    grouped = 0  # elements of the experts' matrices that a token uses
    host = LAYER_HOST
    if moe:
        copies = spec.moe_router_topk
        grouped = spec.mlp_numel(copies * spec.expert_ffn)
        host *= MOE_HOST
    dense = spec.active_numel(number) - grouped
    attention = 2 * tokens * spec.tokens * (spec.query / tensor)
    sent = tokens * BF16 * hidden * copies
    moved = PERMUTED * sent / tensor
    element = tokens * BF16 * (hidden + spec.active_ffn(number) / 3) / tensor
    forward = [
        Work(Kind.PRODUCT, 2 * tokens * dense / tensor),
        Work(Kind.ATTENTION, attention),
        Work(Kind.GROUPED, 2 * tokens * grouped / tensor),
        Work(Kind.MEMORY, FORWARD_PASSES * element + moved, kernels=FORWARD_KERNELS),
    ]
    backward = [
        Work(Kind.ATTENTION, 2.5 * attention),
        Work(Kind.GROUPED, 4 * tokens * grouped / tensor),
        Work(Kind.PRODUCT, 4 * tokens * dense / tensor),
        Work(Kind.MEMORY, BACKWARD_PASSES * element + moved, kernels=BACKWARD_KERNELS),
    ]
    collectives: list[Operation] = []
    if tensor > 1:  # sequence parallelism: a gather and a reduction around attention and MLP
        whole = tokens * hidden * BF16
        gathered = Work(Kind.ALL_GATHER, whole, group="tensor")
        reduced = Work(Kind.REDUCE_SCATTER, whole, group="tensor")
        collectives += [gathered, reduced] * 2
    if moe and parallel.expert > 1:  # dispatch and combine
        collectives += [Work(Kind.EXCHANGE, sent / tensor, group=EXPERTS)] * 2
    forward += collectives
    backward += collectives
    if parallel.recompute:
        backward = forward + backward
    return tuple(forward), tuple(backward), host


HEAD_PASSES = 62.0
"""Memory traffic of loss and softmax per token and vocabulary row, forward and backward."""


def head_work(
    spec: ModelSpec, parallel: Parallel, tokens: float
) -> tuple[tuple[Operation, ...], tuple[Operation, ...]]:
    """A rank's work in forward and in backward of the output layer and the float32 loss."""
    logits = tokens * spec.embedding_rows / parallel.tensor
    products = 2 * logits * spec.hidden_size
    half = Work(Kind.MEMORY, HEAD_PASSES * logits / 2)
    forward = (Work(Kind.PRODUCT, products), half)
    backward = (half, Work(Kind.PRODUCT, 2 * products))
    return forward, backward


def _tokens(spec: ModelSpec, parallel: Parallel, microbatch: int) -> float:
    """Tokens of a microbatch that a rank has outside of GEMMs: sequence parallelism splits them."""
    return microbatch * spec.tokens / parallel.tensor


def layer_bytes(spec: ModelSpec, parallel: Parallel, microbatch: int, number: int) -> float:
    """Bytes that autograd saves for a layer on one rank, without recomputation, with flash
    attention."""
    width = spec.ffn
    if spec.is_moe(number):
        # Tokens are copied per expert, so inputs and outputs count too.
        width = spec.moe_router_topk * (spec.expert_ffn + 2 * spec.hidden_size // 3)
        width += spec.shared_ffn
    return _tokens(spec, parallel, microbatch) * BF16 * spec.saved_numel(width)


@lru_cache(maxsize=4096)
def activation_bytes(
    spec: ModelSpec, parallel: Parallel, microbatch: int, in_flight: float = 1
) -> int:
    """Bytes of activations on a rank of the first stage at the end of a forward, with flash
    attention: tensors that autograd saves in its layers for `in_flight` microbatches, and without a
    pipeline the logits in bf16 and float32."""
    tokens = _tokens(spec, parallel, microbatch)
    layers = layers_of(spec, parallel, 0)
    if parallel.recompute:  # inputs of all layers, and one layer whole
        total = tokens * BF16 * spec.hidden_size * len(layers) * in_flight
        recomputed = 4 * spec.hidden_size + 2 * spec.query + spec.key_value + 3 * spec.ffn
        total += tokens * BF16 * recomputed
    else:
        total = sum(layer_bytes(spec, parallel, microbatch, n) for n in layers) * in_flight
    if parallel.pipeline == 1:
        logits = microbatch * spec.tokens * spec.embedding_rows / parallel.tensor
        total += 6 * logits
    return int(total)
