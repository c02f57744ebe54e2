"""A training step of the engine, written down: real units, groups, slots and order of launches, on
meta tensors, with modules that say what they would compute."""

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
"""Of the compute weights."""

GRAD, MAIN, STATE = 4, 4, 8
"""Bytes of an element of gradients, main weights and optimizer state."""

LAUNCHES = 2000.0
"""Reference microseconds in which the host launches norm, clip and Adam."""

ONE_PASS = 0.81
"""Time of the one-pass Adam (`optim/fused_adam.py`) in that of Transformer Engine's, after
which the rates of memory are: 3.36 of 4.14 TB/s, H200."""


@dataclass(frozen=True)
class StepSetup:
    """What of a configuration the engine and the step see.

    Attributes:
        shards: by domain, ranks over which it is sharded, and instances (the outer axis).
        separate_gathers: gathers have communicators of their own.
        copy_gathers, copy_reduces: carried by copy engines.
        fused: modules write weight gradients into the bucket.
        warmup: forwards in front of the first backward, as in a pipeline's stage.
        fused_step: gradients are clipped while Adam reads them.
        graph: forward and backward are replayed: the host launches nothing.
        layer_graphs: those of each layer are; gathers and reductions are launched.
        weight_format: that linear weights are kept and gathered in, None for bf16.
        rows: strategies of units, by name, that keep more than the engine's.
        unit_numel: elements up to which neighboring layers are joined to a unit.
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
    """Groups of the first rank in a world that is only pretended."""
    shard = _axis(SHARD_DIM, dist.new_group(list(range(inner))))
    others = None
    if outer > 1:
        others = _axis(OUTER_DIM, dist.new_group(list(range(0, inner * outer, inner))))
    mesh = mesh_over([axis for axis in (others, shard) if axis is not None], "cpu")
    # A group of their own tells gathers from reductions; which communicator they are on is said
    # where communicators are made.
    gather = dist.new_group(list(range(inner)))
    return ShardDomain(name, shard, gather, shard.group, mesh, scale, others)


@contextmanager
def pretended_world(size: int) -> Iterator[None]:
    """A default process group of `size` ranks of which only the first exists. RuntimeError inside a
    process that has a real one."""
    if dist.is_initialized():
        raise RuntimeError("a process group exists: plan in a process that does not train")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@dataclass
class _Run:
    """An engine over units, on a runtime that keeps a list."""

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
        """As a training loop of Megatron takes one, with 1F1B order in a pipeline."""
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
        """Norm, clip and Adam of what this rank updates, in the order of their launches. The real
        optimizers are not run: the meta device does not have their kernels."""
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
    """The program of `steps` steps of the engine. `units` in the order in which they compute, the
    root's unit, named "root", at its place. The first step learns the order of units.

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
    """The host launches nothing one by one but the optimizer's part."""
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
    """Makes the communicators of an engine: which axis and which channel each group stands for."""

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
        raise RuntimeError("the engine asks for a communicator of a group that it was not given")
