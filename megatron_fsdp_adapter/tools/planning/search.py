"""Enumerates configurations, simulates the most promising ones, and records why others were
rejected."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, product
from typing import Any

from megatron_fsdp_adapter.checkpoint.digests import Progress, silent
from megatron_fsdp_adapter.core.config import STRATEGIES
from megatron_fsdp_adapter.megatron.options.table import EXPERT_INSTANCES, INSTANCES
from megatron_fsdp_adapter.plan.unsharded_budget import GIB
from megatron_fsdp_adapter.tools.models.sources import split_problems
from megatron_fsdp_adapter.tools.models.spec import DENSE, EXPERT, ModelSpec, Parallel

from .configurations import Configuration, groups, memory
from .guesses import at_least_bytes, seconds
from .machine import Machine
from .prediction import Prediction, predict
from .timing import HOST

HOPELESS = 1.6
"""Ratio of a guessed time to the best guess, above which a configuration is not simulated."""

FEW_TRIES = 6
"""With fewer tries, one configuration is simulated for each combination of split and strategy, not
three, and the baseline has no precedence."""


@dataclass(frozen=True)
class Request:
    """The input of a plan.

    memory_gib: memory of a GPU. fixed: fields of a `Configuration` or `Parallel` that the user has
    chosen. tries: number of configurations that are simulated."""

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
    """The result of a search. predictions: by time, the best first. refused: names of rejected
    configurations, each with the reason."""

    wanted: Request
    predictions: Sequence[Prediction]
    refused: Sequence[tuple[str, str]]


def _powers(limit: int) -> list[int]:
    return [2**i for i in range(20) if 2**i <= limit]


def splits(wanted: Request) -> Iterator[Configuration]:
    """Every model-parallel split that Megatron and the fixed options allow, as a configuration with
    defaults otherwise. A fixed size is tried even if the search would not. Memory is not checked.
    """
    spec = wanted.spec
    domain = wanted.machine.network.domain
    heads = spec.query_groups
    tensors = [n for n in _powers(min(8, domain, wanted.gpus)) if heads % n == 0]
    pipelines = _powers(min(32, spec.num_layers // 2 or 1))
    experts = [1]
    if spec.num_experts:
        experts = [n for n in _powers(spec.num_experts) if spec.num_experts % n == 0]
    choices = product(
        _fixed_or(wanted, "tensor", tensors),
        _fixed_or(wanted, "pipeline", pipelines),
        _fixed_or(wanted, "expert", experts),
        (False, True),
        _fixed_or(wanted, "microbatch", (1, 2, 4)),
    )
    for tensor, pipeline, expert, recompute, micro in choices:
        if wanted.gpus % (tensor * pipeline):
            continue
        virtuals = (1, 2, 4, 8) if pipeline > 1 else (1,)
        for virtual in virtuals:
            if spec.num_layers < pipeline * virtual:
                continue
            parallel = Parallel(tensor, pipeline, virtual, expert, recompute)
            if not all(_allows(wanted, name, value) for name, value in vars(parallel).items()):
                continue
            if not split_problems(spec, parallel, wanted.gpus, micro, wanted.global_batch):
                yield Configuration(wanted.gpus, parallel, microbatch=micro)


def _fixed_or(wanted: Request, name: str, usual: Iterable[int]) -> list[int]:
    """The fixed value of a field alone, or the usual ones."""
    fixed: Any = wanted.fixed.get(name)
    return sorted(usual) if fixed is None else [fixed]


def _allows(wanted: Request, name: str, value: object) -> bool:
    """True unless another value is fixed."""
    return wanted.fixed.get(name, value) == value


def candidates(wanted: Request, split: Configuration) -> Iterator[Configuration]:
    """Every configuration of a model-parallel split."""
    for strategy in STRATEGIES:
        if not _allows(wanted, "strategy", strategy):
            continue
        yield from _with_strategy(wanted, _with_experts(wanted, split, strategy))


def _with_experts(wanted: Request, split: Configuration, strategy: str) -> Configuration:
    """`split` with a strategy, and with what is fixed of experts, if there are any."""
    chosen = replace(split, strategy=strategy)
    if not wanted.spec.num_experts:
        return chosen
    fixed: dict[str, Any] = dict(wanted.fixed)
    return replace(
        chosen,
        expert_strategy=fixed.get("expert_strategy"),
        expert_instances=fixed.get("expert_instances"),
    )


def _with_strategy(wanted: Request, base: Configuration) -> Iterator[Configuration]:
    """Every configuration with the split and the strategy of `base`."""
    parallel = base.parallel
    strategy = base.strategy
    data_ranks = base.data_parallel
    usual = wanted.fixed.get("strategy", "optim")
    if data_ranks == base.experts_over == 1 and strategy != usual:
        return  # one rank: all strategies are the same
    inside = wanted.machine.network.domain // parallel.tensor
    instances = {1}
    for ranks in (inside, 8 * inside, 64 * inside):
        if 0 < ranks < data_ranks:
            instances.add(data_ranks // ranks)
    moe = bool(wanted.spec.num_experts)
    graphs = [False]
    if parallel.pipeline == 1 and not moe:
        graphs.append(True)
    for count, graph in product(_fixed_or(wanted, "instances", instances), graphs):
        if data_ranks % count or base.experts_over % count:
            continue
        of_experts = count if base.expert_instances is None else base.expert_instances
        if of_experts < 1 or base.experts_over % of_experts:
            continue
        near = _is_near(wanted, replace(base, instances=count))
        for outer_optim in {False, count > 1 and strategy != "no_shard"}:
            chosen = replace(
                base, instances=count, outer_optim=outer_optim, graph=graph, separate_gathers=moe
            )
            yield chosen
            if near:
                yield replace(chosen, copies=True, separate_gathers=False)


def _is_near(wanted: Request, chosen: Configuration) -> bool:
    """True if copy engines can do all gathers and reductions of ZeRO-3: each of their groups is
    inside an NVLink domain, those of experts with other instances too."""
    kinds = (DENSE, EXPERT) if wanted.spec.num_experts else (DENSE,)
    group_of = groups(chosen, wanted.machine)
    sharded = [group_of[kind] for kind in kinds if chosen.strategy_of(kind).shard_grads]
    is_inside = all(group.in_domain == group.size for group in sharded)
    is_alone = all(group.size == 1 for group in sharded)
    return chosen.strategy == "optim_grads_params" and is_inside and not is_alone


def plan(wanted: Request, progress: Progress = silent) -> Plan:
    """The best configurations, each simulated with the engine. progress: called after each
    simulation.

    Raises:
        ValueError: none fits, or the fixed options allow none.
    """
    spec = wanted.spec
    machine = wanted.machine
    limit = wanted.memory_gib * GIB
    guessed: list[tuple[float, Configuration]] = []  # with seconds
    # By kind and recomputation: bytes and names of what does not fit.
    too_large: dict[tuple[str, bool], list[tuple[float, str]]] = {}
    for split in splits(wanted):
        for chosen in candidates(wanted, split):
            count = chosen.microbatches(wanted.global_batch)
            needed = at_least_bytes(spec, chosen, count) + machine.gpu.reserved_gib * GIB
            if needed <= limit:
                guessed.append((seconds(spec, chosen, machine, count), chosen))
                continue
            too_large.setdefault(_sort(chosen), []).append((needed, chosen.name))
    if not guessed and not too_large:
        raise ValueError(_why_none(wanted))
    found, refused, needs = _run_best(wanted, guessed, limit, progress)
    refused += _reasons(too_large, {_sort(one.configuration) for one in found}, wanted.memory_gib)
    if not found:
        least, name = min([*needs, *chain.from_iterable(too_large.values())])
        raise ValueError(
            f"no configuration fits in {wanted.memory_gib:g} GiB: the smallest needs "
            f"{math.ceil(least / GIB):,} GiB or more ({name}). Use more GPUs"
        )
    return Plan(wanted, sorted(found, key=lambda one: one.ms), refused)


def _reasons(
    too_large: Mapping[tuple[str, bool], Sequence[tuple[float, str]]],
    found: Collection[tuple[str, bool]],
    memory_gib: float,
) -> Iterator[tuple[str, str]]:
    """Names of configurations that need too much memory, with the reason: the smallest of each sort
    that was not found with its bytes, and then all others."""
    smallest = [min(rows) for sort, rows in too_large.items() if sort not in found]
    for needed, name in smallest:
        yield name, f"states and activations need {math.ceil(needed / GIB)} GiB"
    for row in chain.from_iterable(too_large.values()):
        if row not in smallest:
            yield row[1], f"states and activations need more than {memory_gib:g} GiB"


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
    instances = {
        option: wanted.fixed[field]
        for field, option in (("instances", INSTANCES), ("expert_instances", EXPERT_INSTANCES))
        if field in wanted.fixed
    }
    reasons = split_problems(wanted.spec, parallel, gpus, micro, batch, instances)
    if reasons:
        reason = reasons[-1]
    fixed = ", ".join(f"{name} {value}" for name, value in wanted.fixed.items())
    choices = f" with {fixed}" if fixed else ""
    return f"no configuration of {gpus} GPUs and a global batch of {batch}{choices}: {reason}"


BASELINE = "weights sharded over all ranks, no other split but of experts"
"""The configuration that users of FSDP compare with. It is simulated however slow it is, unless
there are few tries."""


def _kind(chosen: Configuration) -> str:
    """`BASELINE` for a baseline, else the name of the strategy."""
    alone = chosen.parallel.tensor == chosen.parallel.pipeline == 1
    if alone and chosen.strategy == "optim_grads_params":
        return BASELINE
    return chosen.strategy


def _sort(chosen: Configuration) -> tuple[str, bool]:
    """The kind, and whether layers are recomputed: of each a user expects a row or a reason."""
    return _kind(chosen), chosen.parallel.recompute


def _is_due(chosen: Configuration, found: Sequence[Prediction]) -> bool:
    """True for a baseline without a graph if no baseline has been simulated yet."""
    if chosen.graph or _kind(chosen) != BASELINE:
        return False
    return all(_kind(one.configuration) != BASELINE for one in found)


NOT_LAUNCH_BOUND = "not launch-bound, so a graph saves nothing"


def _why_no_graph(chosen: Configuration, found: Sequence[Prediction]) -> str:
    """The reason why the full-iteration graph of a configuration saves nothing; empty if it may. It
    saves nothing if the step has been simulated without it and is not launch-bound."""
    without = replace(chosen, graph=False)
    for one in found:
        if one.configuration == without:
            is_launch_bound = one.spent.get(HOST, 0.0) > 0.01 * one.ms
            return "" if is_launch_bound else NOT_LAUNCH_BOUND
    return ""


def _run_best(
    wanted: Request,
    guessed: Sequence[tuple[float, Configuration]],
    limit: float,
    progress: Progress,
) -> tuple[list[Prediction], list[tuple[str, str]], list[tuple[float, str]]]:
    """Simulates the most promising configurations that fit: at most a few of each combination of
    split and strategy, so that a wrong guess excludes no combination.

    Returns predictions; names of refused configurations with the reason; and bytes and names of
    those that do not fit. guessed: seconds and configuration; limit: bytes."""
    found: list[Prediction] = []
    refused: list[tuple[str, str]] = []
    needs: list[tuple[float, str]] = []
    ordered = sorted(guessed, key=lambda entry: entry[0])  # ties: the simpler one first
    tried: dict[tuple[object, ...], int] = {}  # number by combination
    best = ordered[0][0] if ordered else 0.0
    few = wanted.tries < FEW_TRIES
    most = 1 if few else 3
    for guess, chosen in ordered:
        parallel = chosen.parallel
        combination = (parallel.tensor, parallel.pipeline, parallel.expert, chosen.strategy)
        tried[combination] = tried.get(combination, 0) + 1
        enough = len(found) >= wanted.tries or tried[combination] > most
        hopeless = guess > HOPELESS * best and bool(found)
        if (enough or hopeless) and (few or not _is_due(chosen, found)):
            continue
        if chosen.graph and (why := _why_no_graph(chosen, found)):
            refused.append((chosen.name, why))
            tried[combination] -= 1
            continue
        count = chosen.microbatches(wanted.global_batch)
        held = sum(memory(wanted.spec, chosen, wanted.machine, count).values())
        if held > limit:
            refused.append((chosen.name, f"peak memory {math.ceil(held / GIB)} GiB"))
            needs.append((held, chosen.name))
            tried[combination] -= 1
            continue
        found.append(predict(wanted.spec, chosen, wanted.machine, wanted.global_batch))
        progress(1, max(len(found), wanted.tries))
    return found, refused, needs
