"""A training step of the engine, written down: real units, groups, slots and order of launches, on
meta tensors, with modules that say what they would compute."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp_adapter.core.config import EngineConfig
from megatron_fsdp_adapter.core.engine.direct import GradWriter
from megatron_fsdp_adapter.core.engine.engine import FsdpEngine
from megatron_fsdp_adapter.core.engine.partition import ROOT, partition
from megatron_fsdp_adapter.core.topology import OUTER_DIM, SHARD_DIM, Axis, ShardDomain, mesh_over

from .program import Kind, Program
from .timed_runtime import TimedCommunicator, TimedRuntime


@dataclass(frozen=True)
class Work:
    """Something that a module does on the compute stream. group: of a collective of the model's own
    (tensor or expert parallel), its axis; it is on a communicator of its own."""

    kind: Kind
    amount: float
    group: str = ""
    kernels: int = 1


@dataclass(frozen=True)
class UnitWork:
    """A unit as the model runs it.

    Attributes:
        params: name, shape and domain of each parameter.
        forward, backward: of one microbatch, recomputation included.
        host: reference microseconds to launch the forward; the backward takes as many times as
            many kernels, `BACKWARD_HOST`.
    """

    name: str
    params: tuple[tuple[str, tuple[int, ...], str], ...]
    forward: tuple[Work, ...] = ()
    backward: tuple[Work, ...] = ()
    host: float = 0.0
    backward_reads_weights: bool = True


BACKWARD_HOST = 1.5
"""Times the forward's host time."""


@dataclass(frozen=True)
class StepSetup:
    """What of a configuration the engine and the step see.

    Attributes:
        shards: by domain, ranks over which it is sharded, and instances (the outer axis).
        separate_gathers: gathers have communicators of their own.
        copy_gathers, copy_reduces: carried by copy engines.
        fused: modules write weight gradients into the bucket.
        warmup: forwards in front of the first backward, as in a pipeline's stage.
        clips: the optimizer scales gradients by the norm.
        graph: forward and backward are replayed: the host launches nothing.
    """

    engine: EngineConfig
    shards: Mapping[str, tuple[int, int]]
    microbatches: int = 1
    warmup: int = 0
    dtype: torch.dtype = torch.bfloat16
    separate_gathers: bool = False
    copy_gathers: bool = False
    copy_reduces: bool = False
    fused: bool = False
    clips: bool = True
    graph: bool = False
    state_bytes: int = 8

    def __post_init__(self) -> None:
        if self.microbatches < 1:
            raise ValueError(f"microbatches={self.microbatches}: must be at least 1")
        if not 0 <= self.warmup < self.microbatches:
            raise ValueError(
                f"warmup={self.warmup}: must be from 0 to one less than microbatches="
                f"{self.microbatches}"
            )


class _Charged(torch.autograd.Function):
    """Writes a unit's work down, forward and backward, and makes gradients of the right sizes."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, module: Any, *params: torch.Tensor) -> Any:
        # Shapes, as parameters may not be looked at where backward reads no weights.
        ctx.module = module
        ctx.params = [
            (tuple(p.shape), p.dtype, getattr(p, "get_main_grad", None)) for p in params
        ]
        module.charge("forward")
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        ctx.module.charge("backward")
        grads: list[torch.Tensor | None] = []
        for shape, dtype, write in ctx.params:
            if write is not None:
                view = write()
                ctx.module.writes(view.numel() * view.element_size())
                grads.append(None)
            else:
                grads.append(torch.empty(shape, dtype=dtype, device="meta"))
        return grad, None, *grads


class _Module(nn.Module):
    """A unit's module: parameters without values, work without results."""

    def __init__(self, unit: UnitWork, runtime: TimedRuntime, dtype: torch.dtype) -> None:
        super().__init__()
        self.unit, self._runtime = unit, runtime
        for fqn, shape, _ in unit.params:
            empty = torch.empty(shape, dtype=dtype, device="meta")
            self.register_parameter(_flat(fqn), nn.Parameter(empty))

    def charge(self, part: str) -> None:
        runtime, unit = self._runtime, self.unit
        host = unit.host * (1.0 if part == "forward" else BACKWARD_HOST)
        works = unit.forward if part == "forward" else unit.backward
        for work in works:
            runtime.spend(host / len(works))
            runtime.write(
                work.kind, work.amount, label=f"{part} {unit.name}", part=part,
                kernels=work.kernels, group=work.group,
                channel=f"model {work.group}" if work.group else "",
            )  # fmt: skip

    def writes(self, nbytes: int) -> None:
        """A product ends in the bucket, in its dtype, and not in a gradient of half the size."""
        self._runtime.write(
            Kind.MEMORY, nbytes, label=f"gradient of {self.unit.name}", part="backward"
        )

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return _Charged.apply(value, self, *self.parameters(recurse=False))  # type: ignore[no-any-return,no-untyped-call]


class _Layer(_Module):
    """Slots tell layers from other units by their class."""


def _flat(fqn: str) -> str:
    return fqn.replace(".", "__")


class _Model(nn.Module):
    """Units in order; the root's own parameters are used last but one, like a final norm."""

    def __init__(
        self, units: Sequence[UnitWork], runtime: TimedRuntime, dtype: torch.dtype
    ) -> None:
        super().__init__()
        layers = {u.name for u in units if u.name.startswith("decoder.layers.")}
        self.children_in_order = nn.ModuleList(
            (_Layer if unit.name in layers else _Module)(unit, runtime, dtype) for unit in units
        )

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        for child in self.children_in_order:
            value = child(value)
        return value


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
    model: _Model
    engine: FsdpEngine
    optimizer_numel: int = 0
    _waiting: list[torch.Tensor] = field(default_factory=list)

    def forward(self) -> None:
        value = torch.zeros(1, device="meta", requires_grad=True)
        self._waiting.append(self.model(value * 1.0))

    def backward(self) -> None:
        torch.autograd.backward(self._waiting.pop(0).sum())

    def step(self) -> None:
        """As a training loop of Megatron takes one, with 1F1B order in a pipeline."""
        runtime, count, warmup = self.runtime, self.setup.microbatches, self.setup.warmup
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
        """Norm, clip, Adam: passes over what this rank's optimizer updates."""
        runtime, policy = self.runtime, self.setup.engine.policy
        grad = policy.grads_dtype.itemsize
        main = (policy.main_params_dtype or self.setup.dtype).itemsize
        numel = self.optimizer_numel
        runtime.spend(2000.0)
        runtime.write(Kind.MEMORY, numel * grad, label="gradient norm", part="norm")
        if self.setup.clips:
            runtime.write(Kind.MEMORY, 2 * numel * grad, label="clip", part="norm")
        adam = numel * (grad + 2 * main + 2 * self.setup.state_bytes)
        runtime.write(Kind.MEMORY, adam, label="optimizer", part="optimizer")


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
    model = _Model(units, runtime, setup.dtype)
    of_domain = {
        f"children_in_order.{i}.{_flat(fqn)}": domain
        for i, unit in enumerate(units) for fqn, _, domain in unit.params
    }  # fmt: skip
    modules = {
        f"children_in_order.{i}": child
        for i, child in enumerate(model.children_in_order)
        if units[i].name != ROOT and units[i].params
    }
    pairs = zip(model.children_in_order, units, strict=True)
    reads = {id(child): unit.backward_reads_weights for child, unit in pairs}
    writer = GradWriter.OVERWRITES if setup.fused else GradWriter.AUTOGRAD
    plans = partition(
        model, modules,
        domain_of=lambda param, fqn: of_domain[fqn],
        backward_reads_weights=lambda module: reads[id(module)],
        writer_of=lambda managed: writer if managed.param.ndim > 1 else GradWriter.AUTOGRAD,
    )  # fmt: skip
    scale = 1.0 / max(inner * outer for inner, outer in setup.shards.values())
    domains = {
        name: _domain(name, inner, outer, scale) for name, (inner, outer) in setup.shards.items()
    }
    engine = FsdpEngine(
        model, plans, domains, setup.engine, runtime,  # type: ignore[arg-type]
        make_communicator=_Maker(setup, runtime, domains),  # type: ignore[arg-type]
    )  # fmt: skip
    held = sum(group.held.layout.shard_numel for group in engine.groups)
    return _Run(setup, runtime, model, engine, optimizer_numel=held)


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
