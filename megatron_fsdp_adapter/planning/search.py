"""Which configurations there are, which of them are worth running through the engine, and why not
the others."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

from megatron_fsdp_adapter.cli.estimate import GIB
from megatron_fsdp_adapter.core.config import STRATEGIES

from .configurations import Configuration, Prediction, groups, memory, predict
from .features import NO_FEATURES, Features, problem
from .machine import Machine, collective_seconds
from .program import Kind
from .shapes import DENSE, EXPERT, Parallel, Shape, activation_bytes

FEW_TRIES = 6
"""Below it one configuration is run of each way to split and to shard."""


@dataclass(frozen=True)
class Wanted:
    """What is planned for. `fixed`: fields of a configuration, or of how it is split, that the user
    has chosen."""

    shape: Shape
    machine: Machine
    gpus: int
    global_batch: int
    memory_gib: float
    fixed: Mapping[str, object]
    tries: int = 10
    features: Features = NO_FEATURES
    bf16_wire: bool = False

    def __post_init__(self) -> None:
        for name in ("gpus", "global_batch", "tries"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} {getattr(self, name)}: at least 1")
        if not self.memory_gib > 0:
            raise ValueError(f"--memory-gib {self.memory_gib}: must be above 0")


@dataclass(frozen=True)
class Plan:
    """predictions: by time, the best first. refused: configurations that were not run, and why."""

    wanted: Wanted
    predictions: Sequence[Prediction]
    refused: Sequence[tuple[str, str]]


def _powers(limit: int) -> list[int]:
    return [2**i for i in range(20) if 2**i <= limit]


def candidates(wanted: Wanted) -> Iterator[Configuration]:
    """Every configuration that can be made of the GPUs, whether it fits or not."""
    shape, domain = wanted.shape, wanted.machine.network.domain
    heads = shape.gpt.query_groups
    tensors = [n for n in _powers(min(8, domain, wanted.gpus)) if heads % n == 0]
    pipelines = _powers(min(32, shape.gpt.num_layers // 2 or 1))
    experts = [1]
    if shape.experts is not None:
        experts = [n for n in _powers(shape.experts.number) if shape.experts.number % n == 0]
    splits = product(tensors, pipelines, experts, (False, True), (1, 2, 4))
    for tensor, pipeline, expert, recompute, micro in splits:
        for virtual in (1, 2, 4, 8) if pipeline > 1 else (1,):
            parallel = Parallel(tensor, pipeline, virtual, 1, expert, recompute)
            if wanted.gpus % (tensor * pipeline) or wanted.gpus % (pipeline * expert):
                continue
            if shape.gpt.num_layers < pipeline * virtual:
                continue
            for strategy in STRATEGIES:
                yield from _of(wanted, parallel, strategy, micro)


def _of(
    wanted: Wanted, parallel: Parallel, strategy: str, micro: int
) -> Iterator[Configuration]:
    base = Configuration(wanted.gpus, parallel, strategy, microbatch=micro)
    over = base.sharded_over
    if wanted.global_batch % (base.data_parallel * micro):
        return
    inside = wanted.machine.network.domain // parallel.tensor
    instances = sorted({1, *(over // n for n in (inside, 8 * inside, 64 * inside) if 0 < n < over)})
    graphs = [False, True] if parallel.pipeline == 1 and wanted.shape.experts is None else [False]
    told, row = wanted.features, STRATEGIES[strategy]
    plain = parallel.pipeline == 1 and not parallel.recompute
    for count, graph, wire in product(instances, graphs, {told.bf16_wire, wanted.bf16_wire}):
        if over % count or base.experts_over % count:
            continue
        features = replace(told, bf16_wire=wire)
        if problem(features, row, graph, plain) is not None:
            continue
        for split in {False, count > 1 and strategy != "no_shard"}:
            chosen = replace(
                base, instances=count, outer_optim=split, graph=graph, features=features,
                separate_gathers=wanted.shape.experts is not None,
            )  # fmt: skip
            yield chosen
            if strategy == "optim_grads_params" and over // count <= inside and over > 1:
                yield replace(chosen, copies=True, separate_gathers=False)


def fits(wanted: Wanted, chosen: Configuration) -> bool:
    for name, value in wanted.fixed.items():
        owner = chosen if hasattr(chosen, name) else chosen.parallel
        if getattr(owner, name) != value:
            return False
    return True


def quick_seconds(wanted: Wanted, chosen: Configuration) -> float:
    """A first guess, without the engine: compute, what communication cannot hide beside it, and the
    optimizer. It orders candidates; nobody is told."""
    shape, machine, parallel = wanted.shape, wanted.machine, chosen.parallel
    count = chosen.microbatches(wanted.global_batch)
    tokens = wanted.global_batch * shape.seq_length
    work = shape.step_flops(tokens) / wanted.gpus * (4 / 3 if parallel.recompute else 1)
    work *= _slowest_stage(shape, parallel)
    small = 1.0 if chosen.microbatch * shape.seq_length >= 4096 else 1.2
    compute = work / (machine.gpu.product_tflops * 0.85e12) * small
    numel = _numel(shape, parallel)
    where, row = groups(chosen, machine), STRATEGIES[chosen.strategy]
    gathers = (2 * count if row.shard_weights else 1) if row.shard_main else 0
    reduces = count if row.shard_grads else 1
    link = 0.0
    wire = 1.03 if chosen.features.block_wire else 2 if chosen.features.bf16_wire else 4
    layers = max(1, shape.gpt.num_layers // parallel.pipeline)
    for domain, elements in numel.items():
        for times, kind, size in (
            (gathers, Kind.ALL_GATHER, 2), (reduces, Kind.REDUCE_SCATTER, wire)
        ):  # fmt: skip
            one = collective_seconds(
                kind, size * elements / layers, where[domain], machine.network, chosen.copies
            )
            link += times * layers * one
        link += collective_seconds(
            Kind.ALL_REDUCE, 4 * elements / max(1, where[domain].size),
            where[f"{domain} outer"], machine.network,
        )  # fmt: skip
    slowed = 0.15 * min(link, compute) * (0.4 if chosen.copies else 1.0)
    own = 0.0
    if parallel.tensor > 1:
        whole = 2 * chosen.microbatch * shape.seq_length * shape.gpt.hidden_size
        one = collective_seconds(Kind.ALL_GATHER, whole, where["tensor"], machine.network)
        own = 8 * one * layers * count
    bubble = (parallel.pipeline - 1) / parallel.virtual / count
    held = sum(
        elements / (where[domain].size if row.shard_main else 1)
        for domain, elements in numel.items()
    )
    update = 36 * held / (machine.gpu.memory_tbps * 1e12)
    host = 0.0 if chosen.graph else 5e-3 * layers * count * machine.host
    busy = max(compute + slowed + own, host) * (1 + bubble)
    return busy + max(0.0, link - 0.8 * busy) + update


def _slowest_stage(shape: Shape, parallel: Parallel) -> float:
    """Its work, in parts of the mean: layers cannot be cut, and the last one has the loss."""
    layers, stages = shape.gpt.num_layers, parallel.pipeline
    head = shape.vocabulary * shape.gpt.hidden_size / shape.active_numel(layers - 1)
    most = max(math.ceil(layers / stages), layers // stages + head)
    return most * stages / (layers + head)


@lru_cache(maxsize=4096)
def _numel(shape: Shape, parallel: Parallel) -> dict[str, float]:
    """Elements of a rank's part of the model, by domain."""
    layers = range(shape.gpt.num_layers)
    split = parallel.tensor * parallel.pipeline
    found = {DENSE: 0.0, EXPERT: 0.0}
    found[DENSE] = 2 * shape.vocabulary * shape.gpt.hidden_size / split
    for layer in layers:
        found[DENSE] += shape.attention_numel / split
        if shape.is_moe(layer) and shape.experts is not None:
            found[DENSE] += shape.mlp_numel(shape.experts.shared) / split
            whole = shape.mlp_numel(shape.experts.ffn) * shape.experts.number
            found[EXPERT] += whole / parallel.expert / parallel.pipeline
        else:
            found[DENSE] += shape.mlp_numel(shape.gpt.ffn) / split
    return found


def at_least_bytes(wanted: Wanted, chosen: Configuration) -> float:
    """States and activations, without planning: who has too many of these is not looked at
    further."""
    row, parallel = STRATEGIES[chosen.strategy], chosen.parallel
    in_flight = min(parallel.pipeline, chosen.microbatches(wanted.global_batch))
    again = chosen.microbatches(wanted.global_batch) > 1
    total = float(activation_bytes(wanted.shape, parallel, chosen.microbatch, in_flight))
    for domain, elements in _numel(wanted.shape, chosen.parallel).items():
        inner, outer = chosen.shards[domain]
        part = elements / inner
        held = part / (outer if chosen.outer_optim else 1) if row.shard_main else elements
        total += 12 * held
        if again or not row.shard_grads:
            total += 4 * (part if row.shard_grads else elements)
        total += 0 if row.shard_weights else 2 * elements
    return total


def plan(wanted: Wanted) -> Plan:
    """The best configurations, each run through the engine.

    Raises:
        ValueError: none fits, or the options leave none.
    """
    known: dict[str, tuple[float, Configuration]] = {}
    too_large: dict[str, tuple[float, str]] = {}
    limit = wanted.memory_gib * GIB
    seen = False
    for chosen in candidates(wanted):
        if not fits(wanted, chosen):
            continue
        seen = True
        needed = at_least_bytes(wanted, chosen) + wanted.machine.gpu.reserved_gib * GIB
        if needed > limit:
            before = too_large.get(chosen.strategy, (float("inf"), ""))
            if needed < before[0]:
                too_large[chosen.strategy] = needed, chosen.name
            continue
        known[chosen.name] = quick_seconds(wanted, chosen), chosen
    if not seen:
        raise ValueError(
            f"no configuration of {wanted.gpus} GPUs and a global batch of {wanted.global_batch} "
            f"has {dict(wanted.fixed)}: change the batch, or leave an option out"
        )
    found, refused = _run_best(wanted, known, limit)
    for strategy, (needed, name) in too_large.items():
        if not any(one.configuration.strategy == strategy for one in found):
            refused.append((name, f"states and activations need {needed / GIB:.0f} GiB"))
    if not found:
        least = min((f"{why} ({name})" for name, why in refused), default="nothing was tried")
        raise ValueError(
            f"no configuration fits in {wanted.memory_gib:g} GiB: {least}; use more GPUs"
        )
    return Plan(wanted, sorted(found, key=lambda one: one.ms), refused)


def _run_best(
    wanted: Wanted, known: Mapping[str, tuple[float, Configuration]], limit: float
) -> tuple[list[Prediction], list[tuple[str, str]]]:
    """Runs the most promising that fit: the best of each way to split and to shard first, so that
    a wrong guess costs no kind of them."""
    found: list[Prediction] = []
    refused: list[tuple[str, str]] = []
    ordered = sorted(known.values(), key=lambda entry: (entry[0], entry[1].name))
    times: dict[tuple[object, ...], int] = {}
    best = ordered[0][0] if ordered else 0.0
    for guess, chosen in ordered:
        split = (chosen.parallel.tensor, chosen.parallel.pipeline, chosen.parallel.expert)
        kind = (*split, chosen.strategy)
        times[kind] = times.get(kind, 0) + 1
        if len(found) >= wanted.tries or times[kind] > (1 if wanted.tries < FEW_TRIES else 3):
            continue
        if guess > 1.6 * best and found:
            break
        held = sum(memory(
            wanted.shape, chosen, wanted.machine, chosen.microbatches(wanted.global_batch)
        ).values())  # fmt: skip
        if held > limit:
            refused.append((chosen.name, f"{held / GIB:.0f} GiB at its most"))
            times[kind] -= 1
            continue
        found.append(predict(wanted.shape, chosen, wanted.machine, wanted.global_batch))
    return found, refused
