"""A schedule that takes passes apart: parts of a forward between those of another's backward."""

from __future__ import annotations

from typing import Any

import torch

from megatron_fsdp_adapter.core.engine.prefetch_order import BACKWARD, FORWARD
from megatron_fsdp_adapter.core.engine.scheduled_pass import ScheduledPass
from tests.lib.engine.small_model import microbatch


class Passes:
    """Of one microbatch: every stage is a graph of its own, as in Megatron's schedule."""

    def __init__(self, rig: Any, index: int) -> None:
        model = rig.model
        units = {unit.name: unit for unit in rig.engine.units}
        self.functions = [model.embedding, *model.layers, lambda x: model.head(model.norm(x))]
        names = ["embedding", *(f"layers.{i}" for i in range(len(model.layers))), "head"]
        stages = [[units[name]] if name in units else [] for name in names]
        inside = {unit.ordinal for stage in stages for unit in stage}
        throughout = [unit for unit in rig.engine.units if unit.ordinal not in inside]
        self.forward_pass = ScheduledPass(rig.engine, stages, throughout, FORWARD)
        self.backward_pass = ScheduledPass(rig.engine, stages[::-1], throughout, BACKWARD)
        self.value: Any = microbatch(index)
        self.graphs: list[tuple[Any, torch.Tensor]] = []
        self.grad: Any = None

    def forward(self, stage: int) -> None:
        given = self.value.detach()
        given.requires_grad_(given.is_floating_point())
        with self.forward_pass.part_of(stage):
            self.value = self.functions[stage](given)
        self.forward_pass.leave(stage)
        self.graphs.append((given, self.value))
        if stage + 1 == len(self.functions):
            leaf = self.value.detach().requires_grad_()
            leaf.float().square().mean().backward()
            self.grad = leaf.grad

    def backward(self, stage: int) -> None:
        given, output = self.graphs.pop()
        with self.backward_pass.part_of(stage):
            output.backward(self.grad)
        self.backward_pass.leave(stage)
        self.grad = given.grad


def forward_backward(rig: Any, microbatches: int) -> None:
    """Microbatch by microbatch, the forward of one between the backward of the one before it."""
    before: Any = None
    for index in range(microbatches + 1):
        now = Passes(rig, index) if index < microbatches else None
        if before is not None:
            rig.last(index == microbatches)
        for stage in range(len((before or now).functions)):
            for part in (before and before.backward, now and now.forward):
                if part:
                    part(stage)
        before = now
