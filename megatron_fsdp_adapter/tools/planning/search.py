"""Enumerates configurations, simulates the most promising ones, and records why others were
rejected."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from megatron_fsdp_adapter.checkpoint.digests import Progress, silent
from megatron_fsdp_adapter.core.config import STRATEGIES
from megatron_fsdp_adapter.plan.unsharded_budget import GIB
from megatron_fsdp_adapter.tools.models.sources import split_problems
from megatron_fsdp_adapter.tools.models.spec import ModelSpec, Parallel

from .configurations import Configuration, memory
from .guesses import at_least_bytes, seconds
from .machine import Machine
from .prediction import Prediction, predict
from .timing import HOST

HOPELESS = 1.6
"""Ratio to the best guess above which nothing is simulated."""

FEW_TRIES = 6
"""Number of tries below which one configuration is simulated for each combination of split and
strategy."""


@dataclass(frozen=True)
class Request:
    """The input of a plan. fixed: fields of a `Configuration` or `Parallel` that the user has
    chosen."""

    spec: ModelSpec
    machine: Machine
    gpus: int
    global_batch: int
    memory_gib: float
    fixed: Mapping[str, object]
    tries: int = 10

    def __post_init__(self) -> None:
        numbers = {
            "gpus": self.gpus,
            "global-batch-size": self.global_batch,
            "tries": self.tries,
        }
        for name, number in numbers.items():
            if number < 1:
                raise ValueError(f"--{name} {number}: must be at least 1")
        if not self.memory_gib > 0:
            raise ValueError(f"--memory-gib {self.memory_gib}: must be above 0")


@dataclass(frozen=True)
class Plan:
    """The result of a search. predictions: by time, the best first. refused: rejected
    configurations, and why."""

    wanted: Request
    predictions: Sequence[Prediction]
    refused: Sequence[tuple[str, str]]


def _powers(limit: int) -> list[int]:
    return [2**i for i in range(20) if 2**i <= limit]


def splits(wanted: Request) -> Iterator[Configuration]:
    """Every model-parallel split that the fixed options allow, whether it fits or not, as a
    configuration with defaults."""
    spec = wanted.spec
    domain = wanted.machine.network.domain
    heads = spec.query_groups
    tensors = [n for n in _powers(min(8, domain, wanted.gpus)) if heads % n == 0]
    pipelines = _powers(min(32, spec.num_layers // 2 or 1))
    experts = [1]
    if spec.num_experts:
        experts = [n for n in _powers(spec.num_experts) if spec.num_experts % n == 0]
    choices = product(tensors, pipelines, experts, (False, True), (1, 2, 4))
    for tensor, pipeline, expert, recompute, micro in choices:
        if wanted.gpus % (tensor * pipeline) or not _is(wanted, "microbatch", micro):
            continue
        virtuals = (1, 2, 4, 8) if pipeline > 1 else (1,)
        for virtual in virtuals:
            if spec.num_layers < pipeline * virtual:
                continue
            parallel = Parallel(tensor, pipeline, virtual, expert, recompute)
            if not all(_is(wanted, name, value) for name, value in vars(parallel).items()):
                continue
            if not split_problems(spec, parallel, wanted.gpus, micro, wanted.global_batch):
                yield Configuration(wanted.gpus, parallel, microbatch=micro)


def _is(wanted: Request, name: str, value: object) -> bool:
    """True unless another value is fixed."""
    return wanted.fixed.get(name, value) == value


def candidates(wanted: Request, split: Configuration) -> Iterator[Configuration]:
    """Every configuration of a model-parallel split."""
    for strategy in STRATEGIES:
        if not _is(wanted, "strategy", strategy):
            continue
        for chosen in _of(wanted, replace(split, strategy=strategy)):
            if _is(wanted, "instances", chosen.instances):
                yield chosen


def _of(wanted: Request, base: Configuration) -> Iterator[Configuration]:
    """The candidates of a strategy."""
    parallel = base.parallel
    strategy = base.strategy
    over = base.data_parallel
    if over == base.experts_over == 1 and strategy != "optim":
        return  # one rank: all strategies are the same
    inside = wanted.machine.network.domain // parallel.tensor
    instances = {1}
    for ranks in (inside, 8 * inside, 64 * inside):
        if 0 < ranks < over:
            instances.add(over // ranks)
    moe = bool(wanted.spec.num_experts)
    graphs = [False]
    if parallel.pipeline == 1 and not moe:
        graphs.append(True)
    for count, graph in product(sorted(instances), graphs):
        if over % count or base.experts_over % count:
            continue
        near = strategy == "optim_grads_params" and over // count <= inside and over > 1
        for split in {False, count > 1 and strategy != "no_shard"}:
            chosen = replace(
                base, instances=count, outer_optim=split, graph=graph, separate_gathers=moe
            )
            yield chosen
            if near:
                yield replace(chosen, copies=True, separate_gathers=False)


def plan(wanted: Request, progress: Progress = silent) -> Plan:
    """The best configurations, each simulated with the engine. progress: called after each.

    Raises:
        ValueError: none fits, or the fixed options allow none.
    """
    spec = wanted.spec
    machine = wanted.machine
    limit = wanted.memory_gib * GIB
    known: list[tuple[float, Configuration]] = []
    too_large: dict[str, tuple[float, str]] = {}
    for split in splits(wanted):
        for chosen in candidates(wanted, split):
            count = chosen.microbatches(wanted.global_batch)
            needed = at_least_bytes(spec, chosen, count) + machine.gpu.reserved_gib * GIB
            if needed <= limit:
                known.append((seconds(spec, chosen, machine, count), chosen))
                continue
            large = (needed, chosen.name)
            kind = _kind(chosen)
            too_large[kind] = min(too_large.get(kind, large), large)
    if not known and not too_large:
        raise ValueError(_why_none(wanted))
    found, refused, needs = _run_best(wanted, known, limit, progress)
    kinds_found = {_kind(one.configuration) for one in found}
    for kind, (needed, name) in too_large.items():
        if kind not in kinds_found:
            refused.append((name, f"states and activations need {math.ceil(needed / GIB)} GiB"))
    if not found:
        least, name = min([*needs, *too_large.values()])
        raise ValueError(
            f"no configuration fits in {wanted.memory_gib:g} GiB: the smallest needs "
            f"{math.ceil(least / GIB):,} GiB or more ({name}). Use more GPUs"
        )
    return Plan(wanted, sorted(found, key=lambda one: one.ms), refused)


def _why_none(wanted: Request) -> str:
    """The reason why there is no configuration: the problems of one with only the fixed options."""
    names = vars(Parallel())
    sizes = {name: value for name, value in wanted.fixed.items() if name in names}
    parallel = Parallel(**sizes)  # type: ignore[arg-type]
    micro = wanted.fixed.get("microbatch", 1)
    assert isinstance(micro, int)
    gpus = wanted.gpus
    batch = wanted.global_batch
    reason = "the search has none with these. Leave an option out"
    reasons = split_problems(wanted.spec, parallel, gpus, micro, batch)
    if reasons:
        reason = reasons[-1]
    fixed = ", ".join(f"{name} {value}" for name, value in wanted.fixed.items())
    choices = f" with {fixed}" if fixed else ""
    return f"no configuration of {gpus} GPUs and a global batch of {batch}{choices}: {reason}"


BASELINE = "weights sharded over all ranks, no other split but of experts"
"""The configuration that users of FSDP compare with, so it is simulated however slow it is."""


def _kind(chosen: Configuration) -> str:
    """The baseline, or the strategy."""
    alone = chosen.parallel.tensor == chosen.parallel.pipeline == 1
    if alone and chosen.strategy == "optim_grads_params":
        return BASELINE
    return chosen.strategy


def _is_due(chosen: Configuration, found: Sequence[Prediction]) -> bool:
    """True for a baseline without a graph if there is none yet."""
    if chosen.graph or _kind(chosen) != BASELINE:
        return False
    return all(_kind(one.configuration) != BASELINE for one in found)


NOT_LAUNCH_BOUND = "not launch-bound, so a graph saves nothing"


def _no_use(chosen: Configuration, found: Sequence[Prediction]) -> str:
    """The reason why a full-iteration graph saves nothing: without it the step is not
    launch-bound."""
    without = replace(chosen, graph=False)
    for one in found:
        if one.configuration == without:
            is_launch_bound = one.spent.get(HOST, 0.0) > 0.01 * one.ms
            return "" if is_launch_bound else NOT_LAUNCH_BOUND
    return ""


def _run_best(
    wanted: Request,
    known: Sequence[tuple[float, Configuration]],
    limit: float,
    progress: Progress,
) -> tuple[list[Prediction], list[tuple[str, str]], list[tuple[float, str]]]:
    """Simulates the most promising configurations that fit, at most a few of each combination of
    split and strategy, so that a wrong guess excludes none. Also returns what was refused, and the
    bytes of those that do not fit."""
    found: list[Prediction] = []
    refused: list[tuple[str, str]] = []
    needs: list[tuple[float, str]] = []
    ordered = sorted(known, key=lambda entry: entry[0])  # ties: the simpler one first
    times: dict[tuple[object, ...], int] = {}
    best = ordered[0][0] if ordered else 0.0
    few = wanted.tries < FEW_TRIES
    of_a_kind = 1 if few else 3
    for guess, chosen in ordered:
        parallel = chosen.parallel
        kind = (parallel.tensor, parallel.pipeline, parallel.expert, chosen.strategy)
        times[kind] = times.get(kind, 0) + 1
        enough = len(found) >= wanted.tries or times[kind] > of_a_kind
        hopeless = guess > HOPELESS * best and bool(found)
        if (enough or hopeless) and (few or not _is_due(chosen, found)):
            continue
        if chosen.graph and (why := _no_use(chosen, found)):
            refused.append((chosen.name, why))
            times[kind] -= 1
            continue
        count = chosen.microbatches(wanted.global_batch)
        held = sum(memory(wanted.spec, chosen, wanted.machine, count).values())
        if held > limit:
            refused.append((chosen.name, f"peak memory {math.ceil(held / GIB)} GiB"))
            needs.append((held, chosen.name))
            times[kind] -= 1
            continue
        found.append(predict(wanted.spec, chosen, wanted.machine, wanted.global_batch))
        progress(1, max(len(found), wanted.tries))
    return found, refused, needs
