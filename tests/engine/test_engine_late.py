"""An optimizer on the device whose updates go on behind its step: who waits for them, and for
which. Races between streams, which are pretended, are seen on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_fsdp_adapter.core.config import STRATEGIES
from megatron_fsdp_adapter.core.engine.gather import GatherPipeline
from megatron_fsdp_adapter.core.engine.updates import LateUpdates
from megatron_fsdp_adapter.core.runtime.device import BESIDE, COMPUTE, GATHER, UPDATE
from megatron_fsdp_adapter.sharding.late_optimizer import LateShards
from tests.engine.engine_cases import Rig, Setup
from tests.engine.engine_scenarios import SCENARIOS
from tests.engine.pretended import pretended_world
from tests.engine.recording import RELEASE, RaceError
from tests.engine.test_engine_offload import (
    RARER,
    SAID,
    ZERO_3,
    DeafBetween,
    layers_left_out,
    run,
    with_adam,
)


def read_in_the_midst(rig: Rig) -> None:
    """Somebody reads main weights, and asks nothing else of the engine; then all are gathered."""
    rig.step()
    rig.zero()
    rig.sync(False)
    rig.engine.gather.updates.settle()
    rig.step()


pytestmark = pytest.mark.once

KINDS: dict[str, tuple[dict[str, Any], bool, str]] = {
    "resident": ({}, True, BESIDE), "in host memory": ({"offload": True}, False, UPDATE)
}  # fmt: skip
"""Optimizers whose updates go on behind a step: setup, `late`, the stream of updates."""

OWN = (layers_left_out, read_in_the_midst)


@pytest.fixture(autouse=True)
def own_scenarios(monkeypatch: pytest.MonkeyPatch) -> None:
    for own in OWN:
        monkeypatch.setitem(SCENARIOS, own.__name__, own)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_updates_behind_a_step_are_ordered_and_bits_are_those_of_a_step_in_one(
    strategy: str,
) -> None:
    """With sharded weights in all scenarios: without, in those that have something of their own."""
    others = (*SAID, *RARER, "layers_left_out", "read_in_the_midst")
    for scenario in others if strategy == ZERO_3 else ("steps", "weights_loaded"):
        plain = run(Setup(strategy), scenario)
        ours = run(Setup(strategy), scenario, late=True)
        assert type(ours.optimizer._fsdp_shards) is LateShards  # type: ignore[attr-defined]
        expected, found = plain.weights(), ours.weights()
        assert all(torch.equal(found[name], expected[name]) for name in expected), scenario


@pytest.mark.parametrize("strategy", [pytest.param("optim", marks=pytest.mark.full), ZERO_3])
@pytest.mark.parametrize(
    "variant",
    [
        {"dtype": torch.float32}, {"frozen": True, "tied": True}, {"split": True},
        {"slots": True}, {"world": 4, "rank": 1, "outer": 2, "shard_outer": True},
        {"main_params": torch.bfloat16}, {"own": ("optim", ZERO_3)},
    ],
    ids=lambda variant: ",".join(variant),
)  # fmt: skip
def test_variants(strategy: str, variant: dict[str, Any]) -> None:
    if "own" in variant and strategy == "optim":
        strategy = "optim_grads"
        variant = {"own": ("optim", "optim_grads")}
    plain = run(Setup(strategy, **variant), "steps")
    ours = run(Setup(strategy, **variant), "steps", late=True)
    expected, found = plain.weights(), ours.weights()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_returns_before_its_updates_and_a_unit_waits_for_its_own_alone(kind: str) -> None:
    """They are in the order of the forward, which is behind as many of them as it needs."""
    setup, late, role = KINDS[kind]
    with pretended_world(2, 0):
        rig = with_adam(Setup(ZERO_3, **setup), late=late)
        clocks = rig.runtime._clocks
        behind: list[int] = []
        with rig.watch():
            rig.step()
            rig.zero()
            queued = clocks[role][role]
            for layer in rig.model.layers:
                layer.mark = lambda text: behind.append(queued - clocks[COMPUTE][role])
            rig.last(True)
            rig.loss(1).backward()
            rig.finish()
    units = len(rig.optimizer._fsdp_shards._stages)  # type: ignore[attr-defined]
    assert behind[:4] == [units - 2, units - 3, units - 4, units - 5], "root and embedding first"
    assert behind[4:] == [1] * 4, "all before a backward"


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_forgotten_unit_by_unit_once_their_update_has_read_them(kind: str) -> None:
    setup, late, _ = KINDS[kind]
    rig = run(Setup(ZERO_3, **setup), "steps", late=late)
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


WAITS = {
    (BESIDE, COMPUTE, "late_optimizer"): "steps",
    (GATHER, BESIDE, "gather"): "steps",
    (COMPUTE, BESIDE, "updates"): "layers_left_out",
    (GATHER, BESIDE, "updates"): "read_in_the_midst",
}


@pytest.mark.parametrize(("role", "other", "where"), WAITS)
def test_each_wait_is_needed_and_missed(role: str, other: str, where: str) -> None:
    scenario = WAITS[role, other, where]
    deaf = DeafBetween(role, other, where)
    with pytest.raises(RaceError, match="without waiting for"):
        run(Setup(ZERO_3), scenario, deaf, late=True)
    assert deaf.missed


def test_who_reads_main_weights_is_behind_all_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LateUpdates, "settle", lambda self: None)
    with pytest.raises(RaceError, match="without waiting for beside"):
        run(Setup(ZERO_3), "weights_loaded", late=True)


@pytest.mark.parametrize("kind", KINDS)
def test_updates_are_behind_gathers_that_nobody_used(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup, late, role = KINDS[kind]
    monkeypatch.setattr(GatherPipeline, "begin_step", lambda self: None)
    with pytest.raises(RaceError, match=f"{role}: .* without waiting for gather"):
        run(Setup(ZERO_3, **setup), "evaluations_before_the_step", late=late)
