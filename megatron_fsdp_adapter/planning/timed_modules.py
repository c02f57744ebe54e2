"""Modules that say what they would compute, forward and backward, and compute nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from megatron_fsdp_adapter.core.runtime.device import COMPUTE, LOAD, STORE

from .program import Kind
from .timed_runtime import TimedRuntime


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


BACKWARD_HOST = 1.0
"""Times the forward's host time."""

EXPERTS = "expert parallel"
"""The axis of exchanges between experts."""

REPLAY = 60.0
"""Reference microseconds in which the host replays a graph."""


class Exchanges:
    """Where exchanges between experts run: on the stream of compute, or beside it. Beside it each
    is waited for a layer later: meanwhile a layer of the other microbatch computes, in whose place
    the next one of the same microbatch stands here."""

    def __init__(self, runtime: TimedRuntime) -> None:
        self._runtime, self._beside = runtime, False
        self._running: list[tuple[int, ...]] = []

    def overlap(self, wanted: bool) -> None:
        """From here on."""
        self._beside = wanted
        if not wanted:
            self._wait(0)

    def write(self, exchange: Callable[[], None]) -> None:
        if not self._beside:
            exchange()
            return
        self._runtime.wait(BESIDE, self._runtime.record(COMPUTE))
        self._runtime.submit(BESIDE, exchange)
        self._running.append(self._runtime.record(BESIDE))
        self._wait(OF_LAYER)

    def _wait(self, left: int) -> None:
        while len(self._running) > left:
            self._runtime.wait(COMPUTE, self._running.pop(0))


BESIDE, OF_LAYER = "exchange", 2
"""The stream of exchanges that run beside compute; how many a layer has in a pass: tokens go to
their experts, and come back."""


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
        module.after_forward()
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        ctx.module.before_backward()
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


class UnitModule(nn.Module):
    """A unit's module: parameters without values, work without results. replayed: its kernels are
    in CUDA graphs; after_forward, before_backward: what else is launched there."""

    replayed = False
    exchanges: Exchanges

    def __init__(self, unit: UnitWork, runtime: TimedRuntime, dtype: torch.dtype) -> None:
        super().__init__()
        self.unit, self._runtime = unit, runtime
        self.before_backward: Callable[[], None] = lambda: None
        self.after_forward: Callable[[], None] = lambda: None
        for fqn, shape, _ in unit.params:
            empty = torch.empty(shape, dtype=dtype, device="meta")
            self.register_parameter(flat_name(fqn), nn.Parameter(empty))

    def charge(self, part: str) -> None:
        runtime, unit = self._runtime, self.unit
        host = unit.host * (1.0 if part == "forward" else BACKWARD_HOST)
        works = unit.forward if part == "forward" else unit.backward
        if self.replayed:
            host = REPLAY
        for work in works:
            runtime.spend(host / len(works))
            write = partial(
                runtime.write, work.kind, work.amount, label=f"{part} {unit.name}", part=part,
                kernels=work.kernels, group=work.group,
                channel=f"model {work.group}" if work.group else "",
            )  # fmt: skip
            if work.group == EXPERTS:
                self.exchanges.write(write)
            else:
                write()

    def writes(self, nbytes: int) -> None:
        """A product ends in the bucket, in its dtype, and not in a gradient of half the size."""
        self._runtime.write(
            Kind.MEMORY, nbytes, label=f"gradient of {self.unit.name}", part="backward"
        )

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return _Charged.apply(value, self, *self.parameters(recurse=False))  # type: ignore[no-any-return,no-untyped-call]


class LayerModule(UnitModule):
    """Slots tell layers from other units by their class."""


def flat_name(fqn: str) -> str:
    return fqn.replace(".", "__")


def full_name(fqn: str) -> str:
    """Of a parameter of a `UnitModel`, in the model that it stands for."""
    return fqn.split(".")[-1].replace("__", ".")


class UnitModel(nn.Module):
    """Units in order; the root's own parameters are used last but one, like a final norm."""

    def __init__(
        self, units: Sequence[UnitWork], runtime: TimedRuntime, dtype: torch.dtype
    ) -> None:
        super().__init__()
        layers = {u.name for u in units if u.name.startswith("decoder.layers.")}
        self.children_in_order = nn.ModuleList(
            (LayerModule if unit.name in layers else UnitModule)(unit, runtime, dtype)
            for unit in units
        )
        self.exchanges = Exchanges(runtime)
        for child in self.children_in_order:
            child.exchanges = self.exchanges  # type: ignore[assignment]

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        for child in self.children_in_order:
            value = child(value)
        return value



class ActivationsOnHost:
    """What the first `count` layers keep for backward goes to host memory while the layers behind
    them compute, and comes back ahead of their backward, in the windows that Transformer Engine
    gives each copy: it spreads `count` copies over all layers, and compute waits at the end of each
    window."""

    def __init__(
        self, runtime: TimedRuntime, layers: Sequence[UnitModule], count: int, nbytes: float
    ) -> None:
        if count >= len(layers):
            raise ValueError(
                f"--cpu-offloading-num-layers {count} of {len(layers)} layers: the last one's are "
                "needed at once; use fewer"
            )
        self._runtime, self._nbytes = runtime, nbytes
        each, more = divmod(len(layers), count)
        self._ends = [each * (i + 1) - 1 + min(i + 1, more) for i in range(count)]
        for number, layer in enumerate(layers):
            layer.after_forward = partial(self._forward, number)
            layer.before_backward = partial(self._backward, number)

    def _forward(self, layer: int) -> None:
        if layer == 0:
            self._copy(STORE, Kind.TO_HOST, 0)
        elif layer in self._ends:
            self._runtime.wait(COMPUTE, self._runtime.record(STORE))
            following = self._ends.index(layer) + 1
            if following < len(self._ends):
                self._copy(STORE, Kind.TO_HOST, following)

    def _backward(self, layer: int) -> None:
        """The mirror image: a copy has come back where its window begins."""
        last = len(self._ends) - 1
        if layer == self._ends[last]:
            self._copy(LOAD, Kind.FROM_HOST, last)
        windows = [index for index in range(last + 1) if self._begin(index) == layer]
        for index in windows:
            self._runtime.wait(COMPUTE, self._runtime.record(LOAD))
            if index:
                self._copy(LOAD, Kind.FROM_HOST, index - 1)

    def _begin(self, index: int) -> int:
        return self._ends[index - 1] if index else 0

    def _copy(self, role: str, kind: Kind, index: int) -> None:
        self._runtime.wait(role, self._runtime.record(COMPUTE))
        label = f"{kind.value}: activations of layer {index}"
        self._runtime.submit(role, partial(self._runtime.write, kind, self._nbytes, label=label))
