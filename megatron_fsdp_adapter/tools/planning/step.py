"""Records a training step of the engine on meta tensors.

Units, groups, slots and launches are the real ones. Modules record their work and compute nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp_adapter.core.comm.all_to_all_sum import launch
from megatron_fsdp_adapter.core.engine.engine import FsdpEngine
from megatron_fsdp_adapter.core.engine.partition import ROOT, TO, managed_params, partition
from megatron_fsdp_adapter.core.engine.wgrad import WgradProtocol
from megatron_fsdp_adapter.core.topology import (
    OUTER_DIM,
    SHARD_DIM,
    Axis,
    Domains,
    ShardDomain,
    mesh_over,
)
from megatron_fsdp_adapter.plan.unit_grouping import group_layers

from .configurations import Configuration
from .program import Kind, Program
from .timed_modules import UnitWork, flat_name, unit_model
from .timed_runtime import TimedCommunicator, TimedRuntime, Watch

DTYPE = torch.bfloat16
"""Dtype of compute weights."""

GRAD = 4
MAIN = 4
STATE = 8
"""Bytes of an element of gradients, main weights and optimizer state."""

LAUNCHES = 2000.0
"""Reference microseconds to launch norm, clip and Adam."""

ONE_PASS = 0.81
"""Relative time of the one-pass Adam (`optim/fused_adam.py`), which clips: 3.36 of 4.14 TB/s on
H200. The tables' memory rates are those of Transformer Engine's Adam."""

PASSES = (
    (GRAD, "norm", True),
    (ONE_PASS * (GRAD + 2 * MAIN + 2 * STATE), "optimizer", False),
)
"""Passes of the optimizer over a rank's shards: bytes of an element, part of the step, and
True if the host reads the result."""

OUTSIDE_GRAPH = ("optimizer", "norm", "sync")
"""Parts of a step that the host launches; a graph replays the others."""


def _axis(name: str, group: Any) -> Axis:
    """An axis of a domain, seen from its first rank."""
    return Axis(name, group, tuple(dist.get_process_group_ranks(group)), 0)


def _domain(name: str, inner: int, outer: int, scale: float) -> ShardDomain:
    """A domain of `inner` x `outer` ranks, with the groups of the first one in a fake world."""
    shard = _axis(SHARD_DIM, dist.new_group(list(range(inner))))
    axes = [shard]
    outer_axis = None
    if outer > 1:
        outer_axis = _axis(OUTER_DIM, dist.new_group(list(range(0, inner * outer, inner))))
        axes = [outer_axis, shard]
    mesh = mesh_over(axes, "cpu")
    # A separate group distinguishes gathers from reductions.
    gather = dist.new_group(list(range(inner)))
    return ShardDomain(name, shard, gather, shard.group, mesh, scale, outer_axis)


@contextmanager
def pretended_world(size: int) -> Iterator[None]:
    """A fake default process group of `size` ranks of which only the first exists. torch raises
    ValueError in a process that has a process group."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _run_step(
    engine: FsdpEngine, model: nn.Module, runtime: TimedRuntime, count: int, warmup: int
) -> None:
    """Runs a step of `count` microbatches like Megatron's training loop. After `warmup` forwards a
    forward and a backward alternate, as in a pipeline."""
    waiting: list[torch.Tensor] = []  # outputs whose backward has not run

    def forward() -> None:
        runtime.part = "forward"
        value = torch.zeros(1, device="meta", requires_grad=True)
        waiting.append(model(value * 1.0))

    runtime.mark("step")
    runtime.part = "clear"
    engine.zero_grads()
    for _ in range(warmup):
        forward()
    for index in range(count):
        runtime.mark("microbatch")
        if index + warmup < count:
            forward()
        engine.microbatch(last=index == count - 1)
        runtime.part = "backward"
        torch.autograd.backward(waiting.pop(0).sum())
    runtime.part = "finish"
    engine.finish_grads()
    _record_optimizer(engine, runtime)
    runtime.part = "sync"
    engine.main_weights_changed(stepped=True)
    engine.sync_weights(wait=False)


def _record_optimizer(engine: FsdpEngine, runtime: TimedRuntime) -> None:
    """Records the optimizer's passes, in launch order. The real optimizers cannot run, because
    their kernels do not support the meta device."""
    groups = (group for unit in engine.units for group in unit.groups)
    numel = sum(group.shards.held.layout.shard_numel for group in groups)
    runtime.spend(LAUNCHES)
    for nbytes, part, read in PASSES:
        runtime.write(Kind.MEMORY, round(numel * nbytes), part=part, read=read)


def record_step(
    units: Sequence[UnitWork],
    chosen: Configuration,
    microbatches: int = 1,
    warmup: int = 0,
    unit_numel: int = 0,
    steps: int = 2,
) -> Program:
    """The program of `steps` steps of the engine. The first step learns the order of units.

    units: in order of computation, with the root's unit, named "root"; warmup: forwards before the
    first backward, as in a pipeline stage; unit_numel: elements up to which neighboring layers are
    grouped into a unit. Raises ValueError in a process that has a process group.
    """
    used = {domain for unit in units for _, _, domain in unit.params}
    shards = {name: sizes for name, sizes in chosen.shards.items() if name in used}
    world = max(inner * outer for inner, outer in shards.values())
    with pretended_world(world):
        scale = 1.0 / world
        domains = {name: _domain(name, *sizes, scale) for name, sizes in shards.items()}
        runtime = TimedRuntime()
        model, engine = _build(units, chosen, runtime, domains, unit_numel)
        with Watch(runtime):
            for _ in range(steps):
                _run_step(engine, model, runtime, microbatches, warmup)
        program = runtime.program
        del model, engine  # before their process groups
    if not chosen.graph:
        return program
    operations = []
    for one in program.operations:
        if one.part not in OUTSIDE_GRAPH:  # the graph launches it
            one = replace(one, host=0.0)
        operations.append(one)
    return replace(program, operations=tuple(operations))


def _build(
    units: Sequence[UnitWork],
    chosen: Configuration,
    runtime: TimedRuntime,
    domains: Domains,
    unit_numel: int,
) -> tuple[nn.Module, FsdpEngine]:
    """A model of the units, and an engine for it, as the wrapper would make it."""
    model = unit_model(units, runtime, DTYPE)
    of_domain: dict[str, str] = {}
    modules: dict[str, nn.Module] = {}
    forward_only = []
    names = {ROOT: ROOT}
    for index, (child, unit) in enumerate(zip(model, units, strict=True)):
        number = str(index)
        names[number] = unit.name
        if not unit.backward_reads_weights:
            forward_only.append(number)
        if unit.name != ROOT and unit.params:
            modules[number] = child
        for fqn, _, domain in unit.params:
            of_domain[f"{number}.{flat_name(fqn)}"] = domain

    entries = []
    for entry in managed_params(model, modules):
        entry = replace(entry, domain=of_domain[entry.fqns[0]])
        if chosen.fused and entry.param.ndim > 1:
            entry = replace(entry, writer=WgradProtocol.OVERWRITES)
        entries.append(entry)
    partitioned = partition(modules, entries, forward_only)
    plans = []
    for plan in group_layers(partitioned, unit_numel):
        name = TO.join(names[one] for one in plan.name.split(TO))
        plans.append(replace(plan, name=name))
    config = chosen.engine
    if config.reduce_scatter.launch is launch:
        launched = partial(launch, sum_rows=runtime.sum_rows)
        config = replace(config, reduce_scatter=replace(config.reduce_scatter, launch=launched))
    engine = FsdpEngine(
        model,
        plans,
        domains,
        config,
        runtime,  # type: ignore[arg-type]
        make_communicator=_communicators(chosen, runtime, domains),
    )
    return model, engine


def _communicators(
    chosen: Configuration, runtime: TimedRuntime, domains: Domains
) -> Callable[[Any, torch.device], TimedCommunicator]:
    """A function that makes the communicator of a group, with its axis and channel."""
    separate = chosen.separate_gathers or chosen.copies

    def make(group: Any, device: torch.device) -> TimedCommunicator:
        for name, domain in domains.items():
            if domain.outer is not None and group is domain.outer.group:
                return TimedCommunicator(group, runtime, f"{name} outer", f"{name} outer")
            if group is domain.gather_group:
                channel = f"{name} gathers" if separate else name
                return TimedCommunicator(group, runtime, name, channel, chosen.copies)
            if group is domain.reduce_group:
                return TimedCommunicator(group, runtime, name, name, chosen.copies)
        raise RuntimeError("the engine requests a communicator for an unknown group")

    return make
