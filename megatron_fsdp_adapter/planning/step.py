"""Records a training step of the engine: real units, groups, slots and launches, on meta tensors,
with modules that record their work."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from megatron_fsdp_adapter.comm.all_to_all_sum import launch
from megatron_fsdp_adapter.core.config import EngineConfig, Strategy
from megatron_fsdp_adapter.core.engine.engine import FsdpEngine
from megatron_fsdp_adapter.core.engine.partition import ROOT, TO, partition
from megatron_fsdp_adapter.core.engine.wgrad import WgradProtocol
from megatron_fsdp_adapter.core.layout.format import WeightFormat
from megatron_fsdp_adapter.core.topology import OUTER_DIM, SHARD_DIM, Axis, ShardDomain, mesh_over
from megatron_fsdp_adapter.models.spec import is_linear_weight
from megatron_fsdp_adapter.sharding.unit_grouping import group_layers

from .program import Kind, Program
from .timed_modules import LayerModule, UnitModel, UnitWork, flat_name, full_name
from .timed_quantized import TimedParams
from .timed_runtime import TimedCommunicator, TimedRuntime

DTYPE = torch.bfloat16
"""Dtype of compute weights."""

GRAD, MAIN, STATE = 4, 4, 8
"""Bytes of an element of gradients, main weights and optimizer state."""

LAUNCHES = 2000.0
"""Reference microseconds to launch norm, clip and Adam."""

ONE_PASS = 0.81
"""Relative time of the one-pass Adam (`optim/fused_adam.py`): 3.36 of 4.14 TB/s on H200. The
tables' memory rates are those of Transformer Engine's Adam."""


@dataclass(frozen=True)
class StepSetup:
    """Inputs of the engine and the step from a configuration.

    Attributes:
        shards: domain -> (ranks over which it is sharded, instances of the outer axis).
        separate_gathers: gathers have separate communicators.
        copy_gathers, copy_reduces: run on copy engines.
        fused: modules write weight gradients into the bucket.
        warmup: forwards before the first backward, as in a pipeline stage.
        fused_step: gradients are clipped while Adam reads them.
        graph: full-iteration graph: the host launches no forward or backward.
        layer_graphs: layers are replayed; gathers and reductions are launched.
        weight_format: format in which linear weights are kept and gathered (None: bf16).
        rows: unit name -> strategy, for units that keep more than the engine's strategy.
        unit_numel: elements up to which neighboring layers are grouped into a unit.
    """

    engine: EngineConfig
    shards: Mapping[str, tuple[int, int]]
    microbatches: int = 1
    warmup: int = 0
    separate_gathers: bool = False
    copy_gathers: bool = False
    copy_reduces: bool = False
    fused: bool = False
    fused_step: bool = True
    graph: bool = False
    layer_graphs: bool = False
    weight_format: WeightFormat | None = None
    rows: Mapping[str, Strategy] = field(default_factory=dict)
    unit_numel: int = 0

    def __post_init__(self) -> None:
        if self.microbatches < 1:
            raise ValueError(f"microbatches={self.microbatches}: must be at least 1")
        if not 0 <= self.warmup < self.microbatches:
            raise ValueError(
                f"warmup={self.warmup}: must be from 0 to one less than microbatches="
                f"{self.microbatches}"
            )


def _axis(name: str, group: Any) -> Axis:
    return Axis(name, group, tuple(dist.get_process_group_ranks(group)), 0)


def _domain(name: str, inner: int, outer: int, scale: float) -> ShardDomain:
    """A domain with the groups of the first rank in a fake world."""
    shard = _axis(SHARD_DIM, dist.new_group(list(range(inner))))
    others = None
    if outer > 1:
        others = _axis(OUTER_DIM, dist.new_group(list(range(0, inner * outer, inner))))
    mesh = mesh_over([axis for axis in (others, shard) if axis is not None], "cpu")
    # A separate group distinguishes gathers from reductions. `_Maker` chooses the communicators.
    gather = dist.new_group(list(range(inner)))
    return ShardDomain(name, shard, gather, shard.group, mesh, scale, others)


@contextmanager
def pretended_world(size: int) -> Iterator[None]:
    """A fake default process group of `size` ranks of which only the first exists. Raises
    RuntimeError in a process that has a process group."""
    if dist.is_initialized():
        raise RuntimeError("a process group exists. Plan in a process that does not train")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@dataclass
class _Run:
    """An engine over units on a recording runtime."""

    setup: StepSetup
    runtime: TimedRuntime
    model: UnitModel
    engine: FsdpEngine
    _waiting: list[torch.Tensor] = field(default_factory=list)

    def forward(self) -> None:
        value = torch.zeros(1, device="meta", requires_grad=True)
        self._waiting.append(self.model(value * 1.0))

    def backward(self) -> None:
        torch.autograd.backward(self._waiting.pop(0).sum())

    def step(self) -> None:
        """Runs a step like Megatron's training loop, with 1F1B order in a pipeline."""
        runtime, setup = self.runtime, self.setup
        count, warmup = setup.microbatches, setup.warmup
        runtime.mark("step")
        runtime.part = "clear"
        self.engine.zero_grads()
        runtime.part = "forward"
        for _ in range(warmup):
            self.forward()
        for index in range(count):
            runtime.mark("microbatch")
            runtime.part = "forward"
            if index + warmup < count:
                self.forward()
            self.engine.is_last_microbatch = index == count - 1
            runtime.part = "backward"
            self.backward()
        runtime.mark("finish")
        runtime.part = "finish"
        self.engine.finish_grads()
        runtime.mark("optimizer")
        self._optimizer()
        runtime.part = "sync"
        self.engine.main_weights_changed(stepped=True)
        self.engine.sync_weights(wait=False)

    def _optimizer(self) -> None:
        """Records norm, clip and Adam of this rank's shards, in launch order. The real optimizers
        cannot run, because their kernels do not support the meta device."""
        runtime, fused = self.runtime, self.setup.fused_step
        groups = (group for unit in self.engine.units for group in unit.groups)
        numel = sum(group.held.layout.shard_numel for group in groups)
        runtime.spend(LAUNCHES)
        runtime.write(Kind.MEMORY, numel * GRAD, label="gradient norm", part="norm", read=True)
        if not fused:
            runtime.write(Kind.MEMORY, 2 * numel * GRAD, label="clip", part="norm")
        nbytes = (ONE_PASS if fused else 1.0) * numel * (GRAD + 2 * MAIN + 2 * STATE)
        runtime.write(Kind.MEMORY, round(nbytes), label="Adam", part="optimizer")


def record_step(units: Sequence[UnitWork], setup: StepSetup, steps: int = 2) -> Program:
    """The program of `steps` steps of the engine. The first step learns the order of units.

    units: in the order in which they compute, including the root's unit, named "root".

    Raises:
        RuntimeError: in a process that has a process group.
    """
    world = max(inner * outer for inner, outer in setup.shards.values())
    with pretended_world(world):
        run = _build(units, setup)
        with run.runtime.watching():
            for _ in range(steps):
                run.step()
        run.runtime.mark("end")
        program = run.runtime.program
        del run
    if setup.graph:
        program = replace(program, operations=tuple(_replayed(program)))
    return program


def _replayed(program: Program) -> Iterator[Any]:
    """Operations with host time only for the optimizer's part; a graph replays the others."""
    outside = ("optimizer", "norm", "sync")
    for operation in program.operations:
        yield operation if operation.part in outside else replace(operation, host=0.0)


def _build(units: Sequence[UnitWork], setup: StepSetup) -> _Run:
    runtime = TimedRuntime()
    model = UnitModel(units, runtime, DTYPE)
    layers = [child for child in model.children_in_order if isinstance(child, LayerModule)]
    for layer in layers:
        layer.replayed = setup.layer_graphs
    of_domain = {
        f"children_in_order.{i}.{flat_name(fqn)}": domain
        for i, unit in enumerate(units) for fqn, _, domain in unit.params
    }  # fmt: skip
    modules = {
        f"children_in_order.{i}": child
        for i, child in enumerate(model.children_in_order)
        if units[i].name != ROOT and units[i].params
    }
    pairs = zip(model.children_in_order, units, strict=True)
    reads = {id(child): unit.backward_reads_weights for child, unit in pairs}
    form = setup.weight_format
    writer = WgradProtocol.OVERWRITES if setup.fused else WgradProtocol.AUTOGRAD
    plans = partition(
        model, modules,
        domain_of=lambda param, fqn: of_domain[fqn],
        backward_reads_weights=lambda module: reads[id(module)],
        writer_of=lambda managed: writer if managed.param.ndim > 1 else WgradProtocol.AUTOGRAD,
        format_of=lambda managed: form if is_linear_weight(full_name(managed.fqns[0])) else None,
    )  # fmt: skip
    names = {f"children_in_order.{i}": unit.name for i, unit in enumerate(units)} | {ROOT: ROOT}
    plans = [
        replace(plan, name=TO.join(names[one] for one in plan.name.split(TO)))
        for plan in group_layers(plans, setup.unit_numel)
    ]
    plans = [replace(plan, strategy=setup.rows.get(plan.name)) for plan in plans]
    scale = 1.0 / max(inner * outer for inner, outer in setup.shards.values())
    domains = {
        name: _domain(name, inner, outer, scale) for name, (inner, outer) in setup.shards.items()
    }
    config = setup.engine
    if config.reduce_scatter.launch is launch:
        launched = partial(launch, sum_rows=runtime.sum_rows)
        config = replace(config, reduce_scatter=replace(config.reduce_scatter, launch=launched))
    engine = FsdpEngine(
        model, plans, domains, config, runtime,  # type: ignore[arg-type]
        make_communicator=_Maker(setup, runtime, domains),  # type: ignore[arg-type]
        quantized=TimedParams(runtime, form) if form is not None else None,
    )  # fmt: skip
    return _Run(setup, runtime, model, engine)


@dataclass
class _Maker:
    """Makes the communicators of an engine: maps each group to its axis and channel."""

    setup: StepSetup
    runtime: TimedRuntime
    domains: Mapping[str, ShardDomain]

    def __call__(self, group: Any, device: torch.device) -> TimedCommunicator:
        setup = self.setup
        apart = setup.separate_gathers or setup.copy_gathers or setup.copy_reduces
        for name, domain in self.domains.items():
            if domain.outer is not None and group is domain.outer.group:
                return TimedCommunicator(group, self.runtime, f"{name} outer", f"{name} outer")
            if group is domain.gather_group:
                channel = f"{name} gathers" if apart else name
                return TimedCommunicator(group, self.runtime, name, channel, setup.copy_gathers)
            if group is domain.reduce_group:
                return TimedCommunicator(group, self.runtime, name, name, setup.copy_reduces)
        raise RuntimeError("the engine requests a communicator for an unknown group")
