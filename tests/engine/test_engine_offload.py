"""Main weights and optimizer state in host memory: order of copies, how many units are on the
device at once, and what is read of it. The host stands for both memories."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from megatron_fsdp_adapter.core.config import STRATEGIES
from megatron_fsdp_adapter.core.engine.deferred_updates import DeferredUpdates
from megatron_fsdp_adapter.core.engine.gather import GatherPipeline
from megatron_fsdp_adapter.core.engine.group import ParamGroup
from megatron_fsdp_adapter.core.engine.offloaded import OffloadedBuffer
from megatron_fsdp_adapter.core.runtime.device import (
    COMPUTE,
    GATHER,
    LOAD,
    STORE,
    UPDATE,
    HostRuntime,
)
from megatron_fsdp_adapter.sharding.local_optimizer import adopt
from megatron_fsdp_adapter.sharding.sharded_module import mark_shard
from megatron_fsdp_adapter.sharding.streamed_optimizer import StreamedShards, shards_over
from tests.engine.engine_cases import Rig, Setup, build
from tests.engine.engine_scenarios import SCENARIOS
from tests.engine.pretended import pretended_world
from tests.engine.recording import ALLOCATE, RELEASE, WRITE, RaceError, RecordingRuntime

ZERO_3 = "optim_grads_params"
SAID = ("steps", "microbatches", "evaluation_between", "weights_loaded")
"""Scenarios in which whoever writes main weights says so, as Megatron's loop does."""


def with_adam(setup: Setup, runtime: Any = None) -> Rig:
    """A rig whose steps are torch's AdamW on local shards; inside a pretended world."""
    rig = build(setup, runtime)
    pairs = [pair for pair in rig.engine.pairs if pair.grad is not None]
    for pair in rig.engine.pairs:
        mark_shard(pair)
    optimizer = torch.optim.AdamW([pair.sharded for pair in pairs], lr=0.1)
    with rig.watch():
        begin = rig.engine.gather.begin_step
        adopt(optimizer, lambda unused: begin(), shards_over([rig.engine]))

    @torch.no_grad()
    def step() -> None:
        optimizer.step()
        rig.engine.main_weights_changed(stepped=True)

    rig.optimizer, rig.optimizer_step = optimizer, step  # type: ignore[attr-defined,method-assign]
    _label(rig)
    return rig


def _label(rig: Rig) -> None:
    shards = rig.optimizer._fsdp_shards  # type: ignore[attr-defined]
    if not isinstance(shards, StreamedShards) or not isinstance(rig.runtime, RecordingRuntime):
        return
    for stage in shards._stages:
        unit = next(u.name for u in rig.engine.units if stage.groups[0] in u.groups)
        for number, buffer in enumerate(stage.buffers):
            rig.runtime.label(buffer.device_buffer.tensor, f"{unit}.device_buffer{number}")


def run(setup: Setup, scenario: str, runtime: Any = None) -> Rig:
    with pretended_world(setup.world, setup.rank):
        rig = with_adam(setup, runtime)
        with rig.watch():
            SCENARIOS[scenario](rig)
            rig.engine.to_sharded()
        return rig


RARER = ("steps_without_sync", "forwards_in_flight", "layers_skipped", "forward_raises",
         "zero_before_finish", "weights_read_between", "evaluations_before_the_step")  # fmt: skip


@pytest.mark.parametrize(
    ("strategy", "scenario"),
    [
        *((strategy, scenario) for strategy in STRATEGIES for scenario in SAID),
        *(("optim", scenario) for scenario in RARER),
        *((ZERO_3, scenario) for scenario in RARER),
    ],
)
def test_every_copy_is_ordered_and_bits_are_those_without_offload(
    strategy: str, scenario: str
) -> None:
    plain = run(Setup(strategy), scenario)
    ours = run(Setup(strategy, offload=True), scenario)
    expected, found = plain.weights(), ours.weights()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("strategy", ["optim", ZERO_3])
@pytest.mark.parametrize(
    "variant",
    [
        {"dtype": torch.float32}, {"frozen": True}, {"tied": True}, {"split": True},
        {"slots": True}, {"world": 4, "rank": 1, "outer": 2, "shard_outer": True},
        {"main_params": torch.bfloat16}, {"recipe": "current"},
    ],
    ids=lambda variant: ",".join(variant),
)  # fmt: skip
def test_variants(strategy: str, variant: dict[str, Any]) -> None:
    """Main weights that are compute weights, have their dtype, or are quantized, stay on the
    device."""
    setup = Setup(strategy, **variant)
    plain, ours = run(setup, "steps"), run(setup.but(offload=True), "steps")
    expected, found = plain.weights(), ours.weights()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    for group in ours.engine.groups:
        stays = group.main_dtype == group.key.dtype or group.key.quantized is not None
        assert group.main_on_host == (group.key.requires_grad and not stays)


def test_twins_of_two_units_exist_at_once_and_none_between_steps() -> None:
    """The next unit is loaded before the one in front of it is updated."""
    rig = run(Setup(ZERO_3, offload=True), "steps")
    stages = rig.optimizer._fsdp_shards._stages  # type: ignore[attr-defined]
    twins = [buffer.device_buffer for stage in stages for buffer in stage.buffers]
    assert len(stages) > 4 and not any(device_buffer.allocated for device_buffer in twins)
    there: set[str] = set()
    most, ahead = 0, 0
    for entry in rig.runtime.log:
        unit, _, kind = entry.what.rpartition(".")
        if not kind.startswith("device_buffer"):
            continue
        if entry.action == ALLOCATE:
            assert entry.role == LOAD
            there.add(unit)
        elif entry.action == RELEASE:
            there.discard(unit)
        elif entry.action == WRITE and entry.role == UPDATE:
            ahead += len(there) == 2
        most = max(most, len(there))
    assert most == 2 and ahead > 0


def test_the_first_units_are_loaded_when_the_backwards_are_over() -> None:
    """Behind nothing that the backward does; they go when no step follows, or somebody writes."""
    with pretended_world(2, 0):
        rig = with_adam(Setup(ZERO_3, offload=True))
        shards = rig.optimizer._fsdp_shards  # type: ignore[attr-defined]
        expected = with_adam(Setup(ZERO_3))

        def loaded() -> list[str]:
            return [
                s.unit.name
                for s in shards._stages
                if any(b.device_buffer.allocated for b in s.buffers)
            ]

        with rig.watch():
            rig.step()
            rig.zero()
            rig.forward_backward()
            rig.finish()
            assert loaded() == ["embedding", "root"]
            clocks = rig.runtime._clocks
            assert clocks[LOAD][COMPUTE] < clocks[COMPUTE][COMPUTE] - 5
            rig.zero()
            assert loaded() == []
            rig.forward_backward()
            rig.finish()
            rig.load()
            assert loaded() == []
            rig.optimizer_step()
        with expected.watch():
            expected.step()
            expected.zero()
            expected.forward_backward()
            expected.finish()
            expected.load()
            expected.optimizer_step()
            found, wanted = rig.weights(), expected.weights()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


class DeafBetween(RecordingRuntime):
    """Does not wait where `role` waits for `other` in module `where`."""

    def __init__(self, role: str, other: str, where: str) -> None:
        super().__init__()
        self.pair, self.where, self.missed = (role, other), where, 0

    def wait(self, role: str, event: Any) -> None:
        asked_by = sys._getframe(1).f_code.co_filename
        if (role, event.role) == self.pair and asked_by.endswith(f"/{self.where}.py"):
            self.missed += 1
        else:
            super().wait(role, event)


class DoesNotBlock(RecordingRuntime):
    missed = 0

    def block(self, event: Any) -> None:
        self.missed += 1


def layers_left_out(rig: Rig) -> None:
    """Their updates are the last ones, and nobody gathers them."""
    rig.model.path = [0, 1]
    for _ in range(3):
        rig.step()


WAITS = {
    (LOAD, COMPUTE, "streamed_optimizer"): "weights_loaded",
    (UPDATE, COMPUTE, "streamed_optimizer"): "steps",
    (UPDATE, LOAD, "streamed_optimizer"): "steps",
    (STORE, UPDATE, "streamed_optimizer"): "steps",
    (LOAD, STORE, "streamed_optimizer"): "steps",
    (GATHER, UPDATE, "gather"): "steps",
    (COMPUTE, UPDATE, "deferred_updates"): "layers_left_out",
}


@pytest.mark.parametrize(("role", "other", "where"), WAITS)
def test_each_wait_is_needed_and_missed(
    role: str, other: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SCENARIOS, layers_left_out.__name__, layers_left_out)
    scenario = WAITS[role, other, where]
    run(Setup(ZERO_3, offload=True), scenario)
    deaf = DeafBetween(role, other, where)
    with pytest.raises(RaceError, match="without waiting for"):
        run(Setup(ZERO_3, offload=True), scenario, deaf)
    assert deaf.missed


def test_a_step_returns_before_its_updates_and_a_unit_waits_for_its_own_alone() -> None:
    """They are in the order of the forward, which is behind as many of them as it needs."""
    with pretended_world(2, 0):
        rig = with_adam(Setup(ZERO_3, offload=True))
        clocks = rig.runtime._clocks
        behind: list[int] = []
        with rig.watch():
            rig.step()
            rig.zero()
            queued = clocks[UPDATE][UPDATE]
            for layer in rig.model.layers:
                layer.mark = lambda text: behind.append(queued - clocks[COMPUTE][UPDATE])
            rig.last(True)
            rig.loss(1).backward()
            rig.finish()
    units = len(rig.optimizer._fsdp_shards._stages)  # type: ignore[attr-defined]
    assert behind[:4] == [units - 2, units - 3, units - 4, units - 5], "root and embedding first"
    assert behind[4:] == [1] * 4, "all before a backward"


def test_gradients_are_forgotten_unit_by_unit_once_their_update_has_read_them() -> None:
    rig = run(Setup(ZERO_3, offload=True), "steps")
    lines = [
        entry.what if entry.action == RELEASE else entry.what.split()[-1]
        for entry in rig.runtime.log
        if (entry.action == RELEASE and entry.what.endswith(".grad"))
        or entry.what.startswith("forward layers")
    ]
    second = lines[lines.index("layers.3") + 1 :]
    first, last = second.index("layers.0"), second.index("layers.3")
    released = [line for line in second[first:last] if line.endswith(".grad")]
    assert released == [f"layers.{number}.grad" for number in (1, 2, 3)]
    assert set(second[:first]) == {"root.grad", "embedding.grad", "layers.0.grad"}


def test_updates_are_behind_gathers_that_nobody_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GatherPipeline, "begin_step", lambda self: None)
    with pytest.raises(RaceError, match="update: .* without waiting for gather"):
        run(Setup(ZERO_3, offload=True), "evaluations_before_the_step")


def test_who_reads_main_weights_waits_until_everything_is_back() -> None:
    deaf = DoesNotBlock()
    with pytest.raises(RaceError, match="without waiting for store"):
        run(Setup(ZERO_3, offload=True), "weights_loaded", deaf)
    assert deaf.missed


def test_gradients_stay_until_they_were_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeferredUpdates, "queued", _queued_and_not_said)
    with pytest.raises(RaceError, match=r"release of .*\.grad without waiting for update"):
        run(Setup(ZERO_3, offload=True), "steps")


def _queued_and_not_said(self: DeferredUpdates, unit: Any, event: Any) -> None:
    unit.updated = event


FAULTS: dict[str, tuple[Any, str, Any]] = {
    "not loaded": (OffloadedBuffer, "load", lambda self: self.device_buffer.allocate()),
    "not stored": (OffloadedBuffer, "store", lambda self: None),
    "compute weights not written": (ParamGroup, "write_own_from_twin", lambda self: None),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_is_left_out_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twins are NaN until they are loaded."""
    monkeypatch.setenv("MEGATRON_FSDP_ADAPTER_POISON", "1")
    expected = _trained(Setup(ZERO_3))
    assert all(torch.equal(a, b) for a, b in zip(_trained(Setup(ZERO_3, offload=True)), expected,
                                                 strict=True))
    monkeypatch.setattr(*FAULTS[name])
    found = _trained(Setup(ZERO_3, offload=True))
    assert not all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    if name == "not loaded":
        assert any(value.isnan().any() for value in found)


def _trained(setup: Setup) -> list[torch.Tensor]:
    """Main weights after steps, and what the model then gives."""
    rig = run(setup, "steps", HostRuntime())
    with pretended_world(setup.world, setup.rank):
        output = rig.evaluate()
    return [*rig.weights().values(), output]
