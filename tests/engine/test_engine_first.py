"""A step that updates first what the next forward gathers first: order of launches, races between
streams, which are pretended, and the bits of a step in one."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from megatron_fsdp_adapter.core.engine.gather import GatherPipeline
from megatron_fsdp_adapter.core.runtime.device import COMPUTE, GATHER
from tests.engine.engine_cases import Rig, Setup
from tests.engine.engine_scenarios import SCENARIOS
from tests.engine.pretended import pretended_world
from tests.engine.recording import MARK, WRITE, RaceError
from tests.engine.test_engine_offload import (
    RARER,
    SAID,
    ZERO_3,
    layers_left_out,
    run,
    with_adam,
)

pytestmark = pytest.mark.once

VARIANTS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": torch.float32},
    "tied": {"tied": True},
    "frozen": {"frozen": True},
    "two domains": {"split": True, "world": 4, "rank": 1},
    "slots": {"slots": True},
    "instances": {"world": 4, "rank": 1, "outer": 2, "shard_outer": True},
    "replicas": {"world": 4, "rank": 1, "outer": 2},
    "joined": {"joined": 1000},
    "the first units whole": {"own": ("optim", ZERO_3)},
    "weights kept": {"strategy": "optim_grads"},
    "weights and gradients kept": {"strategy": "optim"},
    "main weights among the kept": {"strategy": "optim", "dtype": torch.float32},
    "kept, instances": {
        "strategy": "optim_grads", "world": 4, "rank": 1, "outer": 2, "shard_outer": True,
    },
    "every weight on each rank": {"strategy": "no_shard"},
    "no root": {"root_norm": False},
    "one rank": {"world": 1, "whole": True},
}


def step_again(rig: Rig) -> None:
    """Two steps without a forward between them, the second told to nobody."""
    rig.step()
    rig.zero()
    rig.forward_backward()
    rig.finish()
    rig.optimizer_step()
    rig.sync(False)
    with torch.no_grad():
        rig.optimizer.step()  # type: ignore[attr-defined]
        rig.optimizer_step()
    rig.step()


@pytest.fixture(autouse=True)
def own_scenarios(monkeypatch: pytest.MonkeyPatch) -> None:
    for own in (layers_left_out, step_again):
        monkeypatch.setitem(SCENARIOS, own.__name__, own)


def check_same(setup: Setup, scenario: str) -> Rig:
    plain, ours = run(setup, scenario), run(setup, scenario, first=True)
    expected, found = plain.weights(), ours.weights()
    assert all(torch.equal(found[name], expected[name]) for name in expected), scenario
    return ours


@pytest.mark.parametrize("slots", [False, pytest.param(True, marks=pytest.mark.full)])
@pytest.mark.parametrize("scenario", [*SAID, *RARER, "layers_left_out", "step_again"])
def test_every_access_is_ordered_and_bits_are_those_of_a_step_in_one(
    scenario: str, slots: bool
) -> None:
    check_same(Setup(ZERO_3, slots=slots), scenario)


@pytest.mark.parametrize("name", VARIANTS)
def test_variants(name: str) -> None:
    for scenario in ("microbatches", "evaluation_between"):
        check_same(Setup(**{"strategy": ZERO_3, **VARIANTS[name]}), scenario)


def lines_of_second_step(setup: Setup, first: bool, microbatches: int = 1) -> list[str]:
    """Gathers, units whose main weights are written, and where layers run: from the end of the
    first backward to that of the second."""
    with pretended_world(setup.world, setup.rank):
        rig = with_adam(setup, first=first)
        with rig.watch():
            rig.forward_backward()
            rig.finish()
            start = len(rig.runtime.log)
            rig.optimizer_step()
            rig.sync(False)
            rig.zero()
            rig.forward_backward(microbatches)
        lines: list[str] = []
        for entry in rig.runtime.log[start:]:
            line = entry.what
            if entry.action == WRITE and entry.what.endswith(".main") and entry.role == COMPUTE:
                line = f"update {entry.what.removesuffix('.main')}"
            elif entry.action != MARK or entry.what.startswith("reduce"):
                continue
            if lines[-1:] != [line]:
                lines.append(line)
        return lines


def gathers(lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith("all_gather")]


@pytest.mark.parametrize("strategy", [ZERO_3, "optim_grads", "optim"])
def test_the_first_units_are_updated_and_gathered_before_the_rest_is_updated(
    strategy: str,
) -> None:
    lines = lines_of_second_step(Setup(strategy), first=True)
    root, embedding = lines.index("all_gather root"), lines.index("all_gather embedding")
    updates = [i for i, line in enumerate(lines) if line.startswith("update ")]
    before = {lines[i] for i in updates if i < root}
    assert before == {"update root", "update embedding"} and root < embedding
    assert {lines[i] for i in updates if i > embedding} == {
        "update head", *(f"update layers.{number}" for number in range(4))
    }
    plain = lines_of_second_step(Setup(strategy), first=False)
    assert max(i for i, line in enumerate(plain) if "update" in line) < plain.index(
        "all_gather root"
    )


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("slots", [False, True])
def test_nothing_is_gathered_twice_or_in_another_order(slots: bool, microbatches: int) -> None:
    ours, plain = (
        gathers(lines_of_second_step(Setup(ZERO_3, slots=slots), first, microbatches))
        for first in (True, False)
    )
    assert ours == plain and len(plain) > 10


def test_a_forward_s_gathers_are_behind_their_update_and_beside_the_others() -> None:
    """Which the events tell, and not the order in which the host launches."""
    with pretended_world(2, 0):
        rig = with_adam(Setup(ZERO_3), first=True)
        seen: dict[str, int] = {}
        inner = rig.engine.gather.gather_early

        def early(units: Any) -> None:
            inner(units)
            seen["at the gathers"] = rig.runtime._clocks[GATHER][COMPUTE]

        rig.engine.gather.gather_early = early  # type: ignore[method-assign]
        with rig.watch():
            rig.forward_backward()
            rig.finish()
            rig.optimizer.step()  # type: ignore[attr-defined]
        assert rig.runtime._clocks[GATHER][COMPUTE] == seen["at the gathers"]


def test_the_gathers_are_behind_the_first_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    inner = GatherPipeline.gather_early

    def unordered(self: GatherPipeline, units: Any) -> None:
        self.follow_compute = lambda: None  # type: ignore[method-assign]
        inner(self, units)
        del self.follow_compute

    monkeypatch.setattr(GatherPipeline, "gather_early", unordered)
    with pytest.raises(RaceError, match="without waiting for compute"):
        run(Setup(ZERO_3, slots=True), "steps", first=True)


def test_what_is_written_behind_a_step_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever may write main weights is behind early gathers, and ends them."""
    _written_between_step_and_sync(Setup(ZERO_3))
    with monkeypatch.context() as patch, pytest.raises(RaceError, match="waiting for gather"):
        patch.setattr(GatherPipeline, "drop_early", lambda self: None)
        _written_between_step_and_sync(Setup(ZERO_3))
    with monkeypatch.context() as patch, pytest.raises(AssertionError):
        patch.setattr(GatherPipeline, "drop_early", GatherPipeline.quiesce)
        _written_between_step_and_sync(Setup(ZERO_3))


def _written_between_step_and_sync(setup: Setup) -> None:
    found = []
    for first in (False, True):
        with pretended_world(setup.world, setup.rank):
            rig = with_adam(setup, first=first)
            with rig.watch():
                rig.step()
                rig.zero()
                rig.forward_backward()
                rig.finish()
                rig.optimizer_step()
                rig.write()
                found.append(rig.evaluate())
    assert torch.equal(*found)


def test_after_a_step_that_raised_groups_are_whole_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch runs no hook behind such a step."""
    module = importlib.import_module("torch.optim.adam")
    original, calls = module.adam, []

    def second_raises(*args: Any, **kwargs: Any) -> None:
        calls.append(len(args[0]))
        if len(calls) == 2:
            raise RuntimeError("the rest")
        original(*args, **kwargs)

    with pretended_world(2, 0):
        rig = with_adam(Setup(ZERO_3), first=True)
        groups = rig.optimizer.param_groups  # type: ignore[attr-defined]
        before = [[id(param) for param in group["params"]] for group in groups]
        monkeypatch.setattr(module, "adam", second_raises)
        with rig.watch():
            with pytest.raises(RuntimeError, match="the rest"):
                rig.step()
            rig.step()
        assert [[id(param) for param in group["params"]] for group in groups] == before
    first, rest = calls[:2]
    assert calls == [first, rest] * 2 and first + rest == len(before[0])
