"""Makes an engine from plans: the steps before and after construction that both wrappers share."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from ..core.comm.wait_watch import watch_world
from ..core.config import EngineConfig
from ..core.engine.engine import FsdpEngine
from ..core.engine.group import laid_out
from ..core.engine.partition import UnitPlan
from ..core.problems import raise_problems
from ..core.runtime.device import make_runtime
from ..core.topology import Domains, ShardDomain
from .fault_report import FaultReport
from .materialize import InitializerOf, materializer
from .replicas import replica_problems
from .same_model import verify_same_model

Engine = TypeVar("Engine", bound=FsdpEngine)


def has_one_rank(domain: ShardDomain) -> bool:
    """True if the domain's shard axis has one rank. Replicas on an outer axis do not count."""
    return domain.axis.size == 1


def with_single_rank_domains(config: EngineConfig, domains: Domains) -> EngineConfig:
    """`config` whose `whole` has the names of the domains of one rank that shard gradients. Their
    parameters are not sharded, gathered or reduced."""
    alone = []
    for name in sorted(domains):
        shards_grads = config.of_domain(name).strategy.shard_grads
        if shards_grads and has_one_rank(domains[name]):
            alone.append(name)
    return replace(config, whole=tuple(alone))


@contextlib.contextmanager
def for_training() -> Iterator[None]:
    """Within it, tensors are made that can be trained, also where the first read or the first
    forward of a model is under `torch.inference_mode` or inside a transform of `torch.func`."""
    with torch.inference_mode(False), temporarily_clear_interpreter_stack():
        yield


@for_training()
def build_engine(
    make: Callable[..., Engine],
    subject: str,
    module: nn.Module,
    plans: Sequence[UnitPlan],
    domains: Domains,
    config: EngineConfig,
    device: torch.device,
    initializer_of: InitializerOf,
    **options: Any,
) -> Engine:
    """The engine over `plans`, on `device`, made after a check that all ranks have the same model.
    Collective.

    make: the engine's class. subject: the wrapper's name in errors. initializer_of: gives values to
    what is on the meta device. options: further options of `make`.

    Raises:
        ValueError: the ranks' models differ.
        CommunicationError, RuntimeError: another rank has failed or is late.
    """
    runtime = make_runtime(device)
    # On whatever stream: core makes another one the current one while it builds the first model
    # whose layers are to be captured, and what it has initialized before may still be queued.
    runtime.synchronize()
    raise_problems(subject, list(replica_problems(plans, domains, config)))
    plans = laid_out(plans, domains, config)
    verify_same_model(subject, plans, config, domains)
    watch = watch_world()
    report = FaultReport(config.strategies_named, watch)
    watched = watch and watch.expect(_sets_of_ranks(domains), not runtime.host_waits)
    with report.building():
        engine = make(
            module,
            plans,
            domains,
            config,
            runtime,
            report.communicator,
            prepare=materializer(module, plans, device, initializer_of),
            **options,
        )
    report.engine_made(engine)
    if watched:
        watched.log = engine.launches.log
        watched.is_alive = weakref.ref(engine)
        watched.calls = partial(_calls_of, weakref.ref(engine))
    return engine


def _calls_of(engine: Callable[[], FsdpEngine | None]) -> dict[str, int]:
    """The number of calls of each unit in the last forward with gradients."""
    alive = engine()
    return {unit.name: unit.forward_calls for unit in alive.units[:-1]} if alive else {}


def _sets_of_ranks(domains: Domains) -> list[Sequence[int]]:
    """The sets of ranks that launch collectives of an engine, each once."""
    found: dict[tuple[int, ...], None] = {}
    for domain in domains.values():
        found[domain.axis.ranks] = None
        if domain.outer is not None:
            found[domain.outer.ranks] = None
    return list(found)
