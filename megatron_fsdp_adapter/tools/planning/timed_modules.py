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
        host: reference microseconds to launch the forward; the backward takes as long.
        backward_reads_weights: True if the engine must gather the weights for the backward.
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
        # Only shapes are kept: backward may not access weights that it does not read.
        ctx.module = module
        ctx.params = []
        for param in params:
            main_grad_of = getattr(param, "get_main_grad", None)
            ctx.params.append((tuple(param.shape), param.dtype, main_grad_of))
        module.charge("forward")
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        ctx.module.charge("backward")
        grads: list[torch.Tensor | None] = []
        for shape, dtype, main_grad_of in ctx.params:
            if main_grad_of is not None:
                view = main_grad_of()
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
        """Records the unit's work of a part of the step, "forward" or "backward"."""
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
    """A layer's module. Its class tells layers from other units, which have other slots."""


def flat_name(fqn: str) -> str:
    """A name without dots, which torch does not allow in the name of a parameter."""
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
