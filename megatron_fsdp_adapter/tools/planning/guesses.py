"""Rough times and lower bounds of memory of configurations, computed without the engine, to order
candidates and skip slow ones."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from megatron_fsdp_adapter.tools.models.spec import DENSE, EXPERT, ModelSpec, Parallel, layers_of

from .configurations import Configuration, groups
from .machine import Gpu, Machine, collective_seconds, operation_seconds
from .program import COLLECTIVES, Kind, Operation
from .shapes import activation_bytes, head_work, layer_work, waits_for_longer


@lru_cache(maxsize=4096)
def stage_seconds(spec: ModelSpec, parallel: Parallel, microbatch: int, gpu: Gpu) -> float:
    """Compute seconds of a microbatch on the slowest stage: the first, or the last, which also
    computes the loss."""
    tokens = microbatch * spec.tokens
    forward, backward, _ = layer_work(spec, parallel, tokens, spec.num_layers - 1)
    layer = _compute_seconds(forward + backward, gpu)
    forward, backward = head_work(spec, parallel, tokens)
    head = _compute_seconds(forward + backward, gpu)
    first = _layers_waited_for(spec, parallel, 0)
    last = _layers_waited_for(spec, parallel, parallel.pipeline - 1)
    return max(first * layer, last * layer + head) * gpu.sustained


def _compute_seconds(works: Sequence[Operation], gpu: Gpu) -> float:
    """Seconds of operations one after the other, without the collectives among them."""
    computes = [work for work in works if work.kind not in COLLECTIVES]
    return sum(operation_seconds(work.kind, work.amount, gpu, work.kernels) for work in computes)


def _layers_waited_for(spec: ModelSpec, parallel: Parallel, stage: int) -> float:
    """The time of a stage in layers: its number of layers, and waits for longer virtual stages."""
    layers = len(layers_of(spec, parallel, stage))
    return layers * (1 + waits_for_longer(spec, parallel, stage))


def seconds(spec: ModelSpec, chosen: Configuration, machine: Machine, count: int) -> float:
    """Seconds of a step of `count` microbatches: compute, exposed communication, and the
    optimizer."""
    parallel = chosen.parallel
    gpu = machine.gpu
    group_of = groups(chosen, machine)
    compute = count * stage_seconds(spec, parallel, chosen.microbatch, gpu)
    layers = max(1, spec.num_layers // parallel.pipeline)
    link = _link_seconds(spec, chosen, machine, layers, count)
    tensor = 0.0
    if parallel.tensor > 1:
        whole = 2 * chosen.microbatch * spec.tokens * spec.hidden_size
        one = collective_seconds(Kind.ALL_GATHER, whole, group_of["tensor"], machine.network)
        tensor = 8 * one * layers * count  # two gathers and two reductions, forward and backward
    slowed = 0.15 * min(link, compute) * (0.4 if chosen.copies else 1.0)
    held = 0.0
    for domain, elements in _numel(spec, parallel).items():
        is_sharded = chosen.strategy_of(domain).shard_main
        held += elements / group_of[domain].size if is_sharded else elements
    host = 0.0
    if not chosen.graph:
        host = 5e-3 * layers * count * machine.host
    bubble = (parallel.pipeline - 1) / parallel.virtual / count
    busy = max(compute + slowed + tensor, host) * (1 + bubble)
    exposed = max(0.0, link - 0.8 * busy)
    optimizer = 36 * held / (gpu.memory_tbps * 1e12)
    return busy + exposed + optimizer


def _link_seconds(
    spec: ModelSpec, chosen: Configuration, machine: Machine, layers: int, count: int
) -> float:
    """Seconds of all-gathers and reductions of data parallelism in a step."""
    group_of = groups(chosen, machine)
    network = machine.network
    link = 0.0
    for domain, elements in _numel(spec, chosen.parallel).items():
        strategy = chosen.strategy_of(domain)
        gathers = 0
        if strategy.shard_main:
            gathers = 2 * count if strategy.shard_weights else 1
        reduces = count if strategy.shard_grads else 1
        passes = ((gathers, Kind.ALL_GATHER, 2), (reduces, Kind.REDUCE_SCATTER, 4))
        inner = group_of[domain]
        for times, kind, size in passes:
            nbytes = size * elements / layers
            one = collective_seconds(kind, nbytes, inner, network, chosen.copies)
            link += times * layers * one
        shard = 4 * elements / max(1, inner.size)
        outer = group_of[f"{domain} outer"]
        link += collective_seconds(Kind.ALL_REDUCE, shard, outer, network)
    return link


def at_least_bytes(spec: ModelSpec, chosen: Configuration, count: int) -> float:
    """A lower bound on bytes of states and activations on the first stage, without planning."""
    parallel = chosen.parallel
    in_flight = parallel.in_flight(0, count)
    total = float(activation_bytes(spec, parallel, chosen.microbatch, in_flight))
    for domain, elements in _numel(spec, parallel).items():
        strategy = chosen.strategy_of(domain)
        inner, outer = chosen.shards[domain]
        part = elements / inner
        held = elements
        if strategy.shard_main:
            held = part / outer if chosen.outer_optim else part
        total += 12 * held  # main weights and two moments, in float32
        if not strategy.shard_grads:
            total += 4 * elements
        elif count > 1:
            total += 4 * part
        if not strategy.shard_weights:
            total += 2 * elements
    return total


@lru_cache(maxsize=4096)
def _numel(spec: ModelSpec, parallel: Parallel) -> dict[str, float]:
    """Domain -> elements of a rank's part of the model."""
    split = parallel.tensor * parallel.pipeline
    found = {DENSE: 2 * spec.embedding_rows * spec.hidden_size / split, EXPERT: 0.0}
    of_experts = sum(spec.is_moe(layer) for layer in range(spec.num_layers))
    dense = spec.num_layers - of_experts
    found[DENSE] += spec.num_layers * spec.attention_numel / split
    found[DENSE] += dense * spec.mlp_numel(spec.ffn) / split
    if spec.num_experts:
        found[DENSE] += of_experts * spec.mlp_numel(spec.shared_ffn) / split
        whole = spec.mlp_numel(spec.expert_ffn) * spec.num_experts
        found[EXPERT] = of_experts * whole / parallel.expert / parallel.pipeline
    return found
