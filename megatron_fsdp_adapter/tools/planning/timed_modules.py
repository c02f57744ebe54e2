"""Modules that record the work of forward and backward without computing."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from megatron_fsdp_adapter.core.layout.ranges import Shape
from megatron_fsdp_adapter.core.runtime.device import COMPUTE
from megatron_fsdp_adapter.tools.models.spec import is_layer

from .program import Kind, Operation
from .timed_runtime import TimedRuntime

Work = functools.partial(Operation, COMPUTE)
"""An operation of a module on the compute stream. group: axis of a collective of the model (tensor
or expert parallel), which has a separate communicator."""


@dataclass(frozen=True)
class UnitWork:
    """The work of a unit.

    Attributes:
        params: name, shape and domain of each parameter.
        forward, backward: work of one microbatch, recomputation included.
        host: reference microseconds to launch the forward, and as long the backward.
    """

    name: str
    params: tuple[tuple[str, Shape, str], ...]
    forward: tuple[Operation, ...] = ()
    backward: tuple[Operation, ...] = ()
    host: float = 0.0
    backward_reads_weights: bool = True


EXPERTS = "expert parallel"
"""The axis of exchanges between experts."""


class _Charged(torch.autograd.Function):
    """Records a unit's work in forward and backward, and makes gradients of the right sizes."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, module: Any, *params: torch.Tensor) -> Any:
        # Only shapes are kept, because backward may not access parameters of units that it does not
        # read.
        ctx.module = module
        ctx.params = []
        for param in params:
            write = getattr(param, "get_main_grad", None)
            ctx.params.append((tuple(param.shape), param.dtype, write))
        module.charge("forward")
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        ctx.module.charge("backward")
        grads: list[torch.Tensor | None] = []
        for shape, dtype, write in ctx.params:
            if write is not None:
                view = write()
                # The GEMM writes into the bucket, in the bucket's dtype, not into a gradient of
                # half the size.
                ctx.module.runtime.write(Kind.MEMORY, view.nbytes, part="backward")
                grads.append(None)
            else:
                grads.append(torch.empty(shape, dtype=dtype, device="meta"))
        return grad, None, *grads


class UnitModule(nn.Module):
    """A unit's module: parameters without values, work without results."""

    def __init__(self, unit: UnitWork, runtime: TimedRuntime, dtype: torch.dtype) -> None:
        super().__init__()
        self.unit = unit
        self.runtime = runtime
        for fqn, shape, _ in unit.params:
            empty = torch.empty(shape, dtype=dtype, device="meta")
            self.register_parameter(flat_name(fqn), nn.Parameter(empty))

    def charge(self, part: str) -> None:
        runtime = self.runtime
        unit = self.unit
        works = unit.forward if part == "forward" else unit.backward
        for work in works:
            runtime.spend(unit.host / len(works))
            runtime.write(
                work.kind,
                work.amount,
                part=part,
                kernels=work.kernels,
                group=work.group,
                channel=f"model {work.group}" if work.group else "",
            )

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        params = self.parameters(recurse=False)
        return _Charged.apply(value, self, *params)  # type: ignore[no-any-return,no-untyped-call]


class LayerModule(UnitModule):
    """A layer's module. Slots distinguish layers from other units by class."""


def flat_name(fqn: str) -> str:
    return fqn.replace(".", "__")


def unit_model(
    units: Sequence[UnitWork], runtime: TimedRuntime, dtype: torch.dtype
) -> nn.Sequential:
    """A model of units in order of computation."""
    modules = []
    for unit in units:
        module = LayerModule if is_layer(unit.name) else UnitModule
        modules.append(module(unit, runtime, dtype))
    return nn.Sequential(*modules)
