"""Passes that a schedule takes apart: parts of a forward between those of another's backward."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from megatron_fsdp_adapter.core.config import STRATEGIES
from megatron_fsdp_adapter.core.engine.gather import GatherPipeline
from megatron_fsdp_adapter.core.engine.prefetch import BACKWARD, FORWARD
from megatron_fsdp_adapter.core.engine.scheduled_pass import ScheduledPass
from megatron_fsdp_adapter.core.engine.unit import Phase
from megatron_fsdp_adapter.core.engine.wgrad import WgradProtocol
from megatron_fsdp_adapter.core.runtime.device import HostRuntime
from tests.engine.engine_cases import Rig, Setup, build, microbatch
from tests.engine.pretended import LateCommunicator, pretended_world
from tests.engine.recording import RaceError

ZERO_3 = "optim_grads_params"


class Passes:
    """Of one microbatch: every stage is a graph of its own, as in Megatron's schedule."""

    def __init__(self, rig: Rig, index: int) -> None:
        model, units = rig.model, {unit.name: unit for unit in rig.engine.units}
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

    def __len__(self) -> int:
        return len(self.functions)

    def forward(self, stage: int) -> None:
        given = self.value.detach()
        given.requires_grad_(given.is_floating_point())
        with self.forward_pass.part_of(stage):
            self.value = self.functions[stage](given)
        self.forward_pass.leave(stage)
        self.graphs.append((given, self.value))
        if stage + 1 == len(self):
            leaf = self.value.detach().requires_grad_()
            leaf.float().square().mean().backward()
            self.grad = leaf.grad

    def backward(self, stage: int) -> None:
        given, output = self.graphs.pop()
        with self.backward_pass.part_of(stage):
            output.backward(self.grad)
        self.backward_pass.leave(stage)
        self.grad = given.grad


def forward_backward(rig: Rig, microbatches: int, watch: Any = lambda: None) -> None:
    """Microbatch by microbatch, the forward of one between the backward of the one before it."""
    before = Passes(rig, 0)
    for stage in range(len(before)):
        before.forward(stage)
    for index in range(1, microbatches + 1):
        rig.last(index == microbatches)
        now = Passes(rig, index) if index < microbatches else None
        for stage in range(len(before)):
            before.backward(stage)
            watch()
            if now is not None:
                now.forward(stage)
                watch()
        before = now  # type: ignore[assignment]


def step(rig: Rig, microbatches: int = 3) -> None:
    rig.zero()
    forward_backward(rig, microbatches)
    rig.finish()
    rig.optimizer_step()
    rig.sync(wait=False)


@pytest.fixture
def world():
    with pretended_world(2):
        yield


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {}, "tied": {"tied": True}, "frozen": {"frozen": True}, "odd": {"layers": 3},
    "no overlap": {"overlap": False}, "selective": {"recompute": "selective"},
    "current": {"recipe": "current"}, "mxfp8": {"recipe": "mxfp8"},
}  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_access_is_ordered(world, strategy, variant):
    rig = build(Setup(strategy, **VARIANTS[variant]))
    with rig.watch():
        step(rig)
        rig.evaluate()
        step(rig, 1)
        rig.step(microbatches=2)
        step(rig)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_weights_are_those_of_whole_calls(strategy, variant):
    found = []
    for take in (step, Rig.step):
        with pretended_world(1):
            setup = Setup(strategy, world=1, dtype=torch.float32, **VARIANTS[variant])
            rig = build(setup, HostRuntime(), LateCommunicator)
            for microbatches in (3, 1, 2):
                take(rig, microbatches)
                rig.evaluate()
            found.append(rig.weights())
    parts, whole = found
    assert parts.keys() == whole.keys()
    for name, value in whole.items():
        assert torch.equal(parts[name], value), name


def test_layers_are_gathered_when_they_are_read_and_no_earlier_than_the_one_before(world):
    rig = build(Setup(ZERO_3, layers=9))
    counts = []

    def watch() -> None:
        layers = [unit for unit in rig.engine.units if unit.name.startswith("layers")]
        counts.append(sum(unit.phase is not Phase.SHARDED for unit in layers))

    rig.zero()
    forward_backward(rig, 3, watch)
    assert max(counts) == 2, "the next one of each pass"


def test_a_unit_that_both_passes_read_is_gathered_once_for_both(world, monkeypatch):
    launched: list[str] = []
    original = GatherPipeline.launch

    def launch(self: Any, unit: Any) -> None:
        launched.append(unit.name)
        original(self, unit)

    monkeypatch.setattr(GatherPipeline, "launch", launch)
    rig = build(Setup(ZERO_3, layers=4))
    rig.zero()
    one, two = Passes(rig, 0), Passes(rig, 1)
    for stage in range(len(one)):
        one.forward(stage)
    launched.clear()
    for stage in range(len(one)):
        one.backward(stage)
        two.forward(stage)
    layers = Counter(name for name in launched if name.startswith("layers"))
    # The passes meet at layer 1, which the forward keeps from before the backward comes to it.
    assert layers == {"layers.0": 2, "layers.1": 1, "layers.2": 2, "layers.3": 2}


def test_without_an_order_of_later_gathers_it_is_a_race(world, monkeypatch):
    """The tests above see one."""
    monkeypatch.setattr(GatherPipeline, "_finish", lambda self, unit: (
        unit.advance(Phase.READY) if unit.phase is Phase.GATHERING else None
    ))  # fmt: skip
    rig = build(Setup(ZERO_3))
    with pytest.raises(RaceError, match="without waiting for"), rig.watch():
        step(rig)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_after_a_part_that_raises_the_next_step_is_like_any_other(world, strategy):
    rig = build(Setup(strategy))
    passes = Passes(rig, 0)
    passes.forward(0)
    passes.functions[1] = None  # type: ignore[call-overload]
    with pytest.raises(TypeError):
        passes.forward(1)
    assert not rig.engine.calls_parts
    rig.zero()
    assert not rig.engine.gather.keeps_any
    with rig.watch():
        step(rig)
        rig.step()


def test_modules_that_write_gradients_by_themselves(world):
    rig = build(Setup(ZERO_3, fused=WgradProtocol.OVERWRITES))
    with rig.watch():
        step(rig)
        step(rig)
