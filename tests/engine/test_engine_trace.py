"""The schedule: golden traces, how much is alive at once, and what a step costs the host."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import megatron_fsdp_adapter
from megatron_fsdp_adapter.config import STRATEGIES
from megatron_fsdp_adapter.engine import prefetch
from megatron_fsdp_adapter.engine.direct import GradWriter
from megatron_fsdp_adapter.engine.reduce import MAX_BUCKETS
from megatron_fsdp_adapter.runtime.device import COMPUTE, HostRuntime
from tests.engine.engine_cases import HIDDEN, Rig, Setup, build, pretended_world
from tests.engine.engine_scenarios import SCENARIOS
from tests.engine.recording import (
    ALLOCATE,
    MARK,
    RELEASE,
    WAIT,
    RecordingRuntime,
)

ZERO_1, ZERO_2, ZERO_3 = "optim", "optim_grads", "optim_grads_params"

# One step with sharded weights and gradients, once the order is known. Everything that is
# allocated, launched, waited for and freed is here; a line is the stream, what, and of which unit.
# At the end gathers wait for compute twice: for the optimizer, which says that it has written, and
# for whoever may have written after it without saying so.
GOLDEN_ZERO_3 = """
compute wait reduce
compute release embedding.grad
compute release layers.0.grad
compute release layers.1.grad
compute release head.grad
compute release root.grad
compute wait gather
compute wait gather
gather allocate layers.0.weight
gather all_gather layers.0
gather wait compute
gather release embedding.weight
compute wait gather
gather allocate layers.1.weight
gather all_gather layers.1
compute forward layers.0
gather wait compute
gather release layers.0.weight
compute wait gather
gather allocate head.weight
gather all_gather head
compute forward layers.1
gather wait compute
gather release layers.1.weight
compute wait gather
gather allocate layers.1.weight
gather all_gather layers.1
gather wait compute
gather release head.weight
compute allocate head.bucket
compute allocate head.grad
reduce wait compute
reduce reduce_scatter head
compute wait gather
gather allocate layers.0.weight
gather all_gather layers.0
compute backward layers.1
gather wait compute
gather release layers.1.weight
compute allocate layers.1.bucket
compute allocate layers.1.grad
reduce wait compute
reduce reduce_scatter layers.1
compute wait gather
compute backward layers.0
gather wait compute
gather release layers.0.weight
compute wait reduce
compute release head.bucket
compute allocate layers.0.bucket
compute allocate layers.0.grad
reduce wait compute
reduce reduce_scatter layers.0
gather wait compute
gather release root.weight
compute wait reduce
compute release layers.1.bucket
compute allocate root.bucket
compute allocate root.grad
reduce wait compute
reduce reduce_scatter root
compute wait reduce
compute release layers.0.bucket
compute allocate embedding.bucket
compute allocate embedding.grad
reduce wait compute
reduce reduce_scatter embedding
compute wait reduce
compute release root.bucket
compute wait reduce
compute release embedding.bucket
compute wait reduce
compute wait gather
gather wait compute
gather wait compute
gather allocate root.weight
gather all_gather root
gather allocate embedding.weight
gather all_gather embedding
"""

# The same with kept weights and gradient buffers, up to the optimizer step.
GOLDEN_ZERO_1 = """
compute wait reduce
compute wait gather
compute wait gather
gather all_gather layers.0
compute wait gather
gather all_gather layers.1
compute forward layers.0
compute wait gather
gather all_gather head
compute forward layers.1
compute wait gather
reduce wait compute
reduce reduce_scatter head
compute backward layers.1
reduce wait compute
reduce reduce_scatter layers.1
compute backward layers.0
reduce wait compute
reduce reduce_scatter layers.0
reduce wait compute
reduce reduce_scatter root
reduce wait compute
reduce reduce_scatter embedding
compute wait reduce
compute wait gather
"""


def schedule(runtime: RecordingRuntime) -> list[str]:
    """The log as lines, without reads, writes and records."""
    lines = []
    for entry in runtime.log:
        if entry.action in (ALLOCATE, RELEASE, WAIT):
            lines.append(f"{entry.role} {entry.action} {entry.what}")
        elif entry.action == MARK:
            lines.append(f"{entry.role} {entry.what}")
    return lines


def steady(setup: Setup, steps: int = 1, **step: Any) -> Rig:
    """A rig whose log holds `steps` steps after two that it learned from."""
    with pretended_world(setup.world, setup.rank):
        rig = build(setup)
        with rig.watch():
            rig.step(**step)
            rig.step(**step)
            rig.runtime.log.clear()
            for _ in range(steps):
                rig.step(**step)
    return rig


def golden(text: str) -> list[str]:
    return text.strip().splitlines()


def test_golden_step_with_sharded_weights():
    assert schedule(steady(Setup(ZERO_3, layers=2)).runtime) == golden(GOLDEN_ZERO_3)


def test_golden_step_with_kept_weights():
    lines = schedule(steady(Setup(ZERO_1, layers=2)).runtime)
    expected = golden(GOLDEN_ZERO_1)
    assert lines[: len(expected)] == expected
    rest = [line for line in lines[len(expected) :] if line != "gather wait compute"]
    assert rest == ["gather all_gather root", "gather all_gather embedding"]


@pytest.mark.parametrize("strategy", [ZERO_1, ZERO_2, ZERO_3])
def test_the_next_gather_is_issued_after_this_wait_and_before_this_forward(strategy):
    lines = schedule(steady(Setup(strategy, layers=5)).runtime)
    for index in range(4):
        forward = lines.index(f"compute forward layers.{index}")
        launched = lines.index(f"gather all_gather layers.{index + 1}")
        waited = max(i for i, line in enumerate(lines[:launched]) if line == "compute wait gather")
        assert waited < launched < forward
        between = lines[waited + 1 : launched]
        assert all(line.startswith("gather allocate") for line in between)


def test_backward_releases_a_unit_before_it_gathers_the_one_after_next():
    lines = schedule(steady(Setup(ZERO_3, layers=6)).runtime)
    lines = lines[lines.index("compute backward layers.5") :]
    for index in range(5, 1, -1):
        released = lines.index(f"gather release layers.{index}.weight")
        launched = lines.index(f"gather all_gather layers.{index - 2}")
        assert lines.index(f"compute backward layers.{index}") < released < launched
        assert launched < lines.index(f"compute backward layers.{index - 1}")


def test_without_overlap_a_gather_is_launched_when_it_is_needed():
    """And the reductions are launched together, when gradients are asked for."""
    lines = schedule(steady(Setup(ZERO_1, layers=3, overlap=False)).runtime)
    before = lines[: lines.index("compute forward layers.0")]
    assert not any("all_gather layers.1" in line for line in before)
    last_backward = lines.index("compute backward layers.0")
    reductions = [i for i, line in enumerate(lines) if "reduce_scatter" in line]
    assert len(reductions) == 6 and min(reductions) > last_backward


# What is alive at once.


def alive(runtime: RecordingRuntime, kind: str) -> list[dict[str, int]]:
    """Bytes by unit of the buffers ".kind", after each allocation."""
    now: dict[str, int] = {}
    history = []
    for entry in runtime.log:
        unit, _, suffix = entry.what.rpartition(".")
        if suffix == kind and entry.action == ALLOCATE:
            now[unit] = entry.nbytes
            history.append(dict(now))
        elif suffix == kind and entry.action == RELEASE:
            now.pop(unit, None)
    return history


def weight_bytes(rig: Rig) -> dict[str, int]:
    return {unit.name: unit.weight_bytes for unit in rig.engine.units}


def neighbours(rig: Rig) -> int:
    """Bytes of the two largest units in a row, of those that use weights one after another."""
    sizes = weight_bytes(rig)
    order = [rig.engine.units[i].name for i in rig.engine.order._known[prefetch.FORWARD]]
    chain = [sizes[name] for name in order if name != "root"]
    return max(one + two for one, two in pairwise(chain))


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("recompute", [None, "reentrant", "non_reentrant", "selective"])
def test_root_and_two_units_are_gathered_at_once(recompute, microbatches):
    """The bound: the root unit (which stays from the start of forward to the end of backward), the
    unit that computes, and the next one. It is met, and never exceeded."""
    setup = Setup(ZERO_3, layers=5, recompute=recompute, width=1)
    rig = steady(setup, steps=2, microbatches=microbatches)
    history = alive(rig.runtime, "weight")
    assert max(len(units) for units in history) == 3
    assert all("root" in units for units in history if len(units) == 3)
    assert max(sum(units.values()) for units in history) == (
        weight_bytes(rig)["root"] + neighbours(rig)
    )


@pytest.mark.parametrize("strategy", [ZERO_2, ZERO_3])
@pytest.mark.parametrize(("layers", "tied"), [(5, False), (5, True), (12, False)])
def test_two_units_have_buckets_at_once(strategy, layers, tied):
    """Whatever the number of layers: what a reduction reads goes when that one has passed."""
    rig = steady(Setup(strategy, layers=layers, tied=tied), steps=2, microbatches=2)
    history = alive(rig.runtime, "bucket")
    assert max(len(units) for units in history) == MAX_BUCKETS == 2
    sizes = sorted(group.bucket.nbytes for group in rig.engine.groups)
    assert max(sum(units.values()) for units in history) <= sum(sizes[-2:])


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_bounds_hold_whatever_happens(scenario):
    """The unit that ended the last forward is kept for the backward that normally comes next. When
    that does not come next, or another layer came last, it is one more. So is a unit between its
    two backwards. A sync with `wait` gathers everything because it is told to."""
    with pretended_world(2):
        rig = build(Setup(ZERO_3, layers=6))
        with rig.watch():
            rig.step()
            rig.runtime.log.clear()
            SCENARIOS[scenario](rig)
    one_more = {"forwards_in_flight", "forward_raises", "forward_without_backward",
                "inner_module_called", "layers_skipped", "layer_again_later"}  # fmt: skip
    limit = len(rig.engine.units) if scenario == "steps_with_full_sync" else 3
    limit += scenario in one_more
    assert max(len(units) for units in alive(rig.runtime, "weight")) <= limit
    assert max(len(units) for units in alive(rig.runtime, "bucket")) <= 2


def test_layers_dropped_at_random_leave_no_gathers_behind():
    """Each pass is unlike the one before, so predictions fail again and again."""
    with pretended_world(2):
        rig = build(Setup(ZERO_3, layers=16))
        with rig.watch():
            for start in range(6):
                rig.model.path = [i for i in range(16) if (i * i + start) % 3]
                rig.step()
    assert max(len(units) for units in alive(rig.runtime, "weight")) <= 4


def test_between_steps_nothing_transient_is_alive():
    with pretended_world(2):
        rig = build(Setup(ZERO_3))
        with rig.watch():
            for _ in range(2):
                rig.step(sync=False)
                assert not any(group.weight.allocated for group in rig.engine.groups)
                assert not any(group.bucket.allocated for group in rig.engine.groups)
                assert all(group.grad.allocated for group in rig.engine.groups)
            rig.zero()
            assert not any(group.grad.allocated for group in rig.engine.groups)


@pytest.mark.parametrize("budget_units", [0, 1, 2, 3])
def test_prefetch_budget_is_in_bytes(budget_units):
    """Weights are gathered ahead until the budget is used up: one unit more than fits in it
    entirely, and at least one."""
    with pretended_world(1):
        layer = weight_bytes(build(Setup(ZERO_3, layers=6)))["layers.0"]
    setup = Setup(ZERO_3, layers=6, tied=True, world=2)
    with pretended_world(2):
        layer = weight_bytes(build(setup))["layers.0"]
    rig = steady(setup.but(prefetch_bytes=layer * budget_units), steps=2)
    ahead = max(budget_units, 1)
    assert max(len(units) for units in alive(rig.runtime, "weight")) == 2 + ahead


# Issue order and counts.


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("scenario", ["layers_skipped", "backward_raises", "evaluation_between"])
def test_issue_order_is_equal_on_every_rank(strategy, scenario):
    traces = []
    for rank in range(3):
        setup = Setup(strategy, world=3, rank=rank, recompute="non_reentrant")
        with pretended_world(3, rank):
            rig = build(setup)
            with rig.watch():
                SCENARIOS[scenario](rig)
        traces.append(schedule(rig.runtime))
    assert traces[0] == traces[1] == traces[2]
    assert any("all_reduce" in line or "reduce_scatter" in line for line in traces[0])


def collectives(rig: Rig) -> Counter[str]:
    names = ("all_gather", "reduce_scatter", "all_reduce")
    return Counter(
        entry.what for entry in rig.runtime.log
        if entry.action == MARK and entry.what.split()[0] in names
    )  # fmt: skip


@pytest.mark.parametrize("width", [0, 9])
def test_collectives_are_counted_by_unit_and_not_by_parameter(width):
    """Per step of 3 microbatches. In backward, root and head are still there from forward, and an
    embedding needs no weights; between microbatches the root stays."""
    layers = [f"layers.{i}" for i in range(4)]
    units = ["embedding", *layers, "head", "root"]

    def counted(strategy: str) -> Counter[str]:
        return collectives(steady(Setup(strategy, width=width), microbatches=3))

    once = Counter({f"all_gather {unit}": 1 for unit in units})
    assert counted("no_shard") == Counter({f"all_reduce {unit}": 1 for unit in units})
    assert counted(ZERO_1) == once + Counter({f"reduce_scatter {unit}": 1 for unit in units})
    reduced = Counter({f"reduce_scatter {unit}": 3 for unit in units})
    assert counted(ZERO_2) == once + reduced
    times = {"root": 1, "embedding": 3, "head": 3, **dict.fromkeys(layers, 6)}
    gathered = Counter({f"all_gather {unit}": times[unit] for unit in units})
    assert counted(ZERO_3) == gathered + reduced


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_of_inputs_alone_reduce_nothing(strategy):
    """And leave the step as it was: a backward comes before, and another after."""
    with pretended_world(2):
        rig = build(Setup(strategy))
        with rig.watch():
            rig.step()
            rig.zero()
            rig.last(False)
            rig.loss().backward()
            states = [group.grad_state for group in rig.engine.groups]
            rig.last(True)
            rig.runtime.log.clear()
            x = torch.ones(2, HIDDEN, dtype=rig.setup.dtype, requires_grad=True)
            torch.autograd.grad(rig.model.layers[3](rig.model.layers[1](x)).float().sum(), x)
            assert not any("reduce" in name for name in collectives(rig))
            assert [group.grad_state for group in rig.engine.groups] == states
            rig.loss().backward()
            rig.finish()


def test_gradients_of_inputs_alone_through_fused_weight_gradients_are_an_error():
    with pretended_world(2):
        rig = build(Setup(fused=GradWriter.OVERWRITES))
        x = torch.ones(2, HIDDEN, dtype=rig.setup.dtype, requires_grad=True)
        loss = rig.model.layers[1](x).float().sum()
        with pytest.raises(RuntimeError, match="switch gradient_accumulation_fusion off"):
            torch.autograd.grad(loss, x)
        rig.step()


@pytest.mark.parametrize("recompute", ["reentrant", "non_reentrant", "selective"])
def test_recomputing_gathers_nothing_more(recompute):
    plain = collectives(steady(Setup(ZERO_3), microbatches=2))
    assert collectives(steady(Setup(ZERO_3, recompute=recompute), microbatches=2)) == plain


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_domains_of_one_unit_make_one_schedule(strategy):
    """A unit with parameters in two domains has one collective in each, side by side, and the
    same schedule otherwise."""
    setup = Setup(strategy, world=4, rank=3)
    one, two = steady(setup), steady(setup.but(split=True))
    assert {len(unit.groups) for unit in two.engine.units if "layers" in unit.name} == {2}
    sizes = {group.domain.axis.size for group in two.engine.groups}
    assert sizes == {4, 2}
    lines = [line.replace("#1", "") for line in schedule(two.runtime)]
    kept: list[str] = []
    for line in lines:
        kept += [line] if not kept or kept[-1] != line or "wait" in line else []
    assert kept == schedule(one.runtime)
    counted, plain = collectives(two), collectives(one)
    names = [name for name in plain if "layers" in name]
    assert names and all(counted[f"{name}#1"] == counted[name] == plain[name] for name in names)


# Host cost.


class _Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


class CountedRuntime(HostRuntime):
    """Counts the operations that run on the gather and reduce streams."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: Counter[str] = Counter()

    def submit(self, role: str, *tasks: Any) -> None:
        assert role != COMPUTE
        with _Counting() as mode:
            super().submit(role, *tasks)
        self.operations.update(mode.calls)

    def launch(self, role: str, *tasks: Any) -> None:
        with _Counting() as mode:
            self._begin(role, tasks[0])
        self.operations.update(mode.calls)
        self.submit(role, *tasks[1:])


def step_cost(setup: Setup) -> tuple[Counter[str], Counter[str], Counter[str]]:
    """Of forward and backward of a step that knows the order: calls of the package's functions,
    operations on the gather and reduce streams, and operations on compute in `take_grads`."""
    folder = str(Path(megatron_fsdp_adapter.__file__).parent)
    calls: Counter[str] = Counter()

    def profile(frame: Any, event: str, arg: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(folder) and code.co_name[0] != "<":
            calls[code.co_name] += 1

    with pretended_world(2):
        rig = build(setup, CountedRuntime())
        taken = _count_operations_of(rig)
        rig.step()
        rig.step()
        rig.zero()
        rig.runtime.operations.clear()
        taken.clear()
        gc.disable()  # an earlier test's engine may be collected, whose finalizer would be counted
        sys.setprofile(profile)
        try:
            rig.forward_backward(2)
        finally:
            sys.setprofile(None)
            gc.enable()
    return calls, rig.runtime.operations, taken


def _count_operations_of(rig: Rig) -> Counter[str]:
    counted: Counter[str] = Counter()

    def wrap(original: Any) -> Any:
        def take_grads(accumulate: bool) -> None:
            with _Counting() as mode:
                original(accumulate)
            counted.update(mode.calls)

        return take_grads

    for group in rig.engine.groups:
        group.take_grads = wrap(group.take_grads)  # type: ignore[method-assign]
    return counted


PER_PARAMETER = {"guard", "unguard"}
"""Called for each parameter on the gather path: an assignment of `__class__`, about 0.1 us."""


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_host_cost_is_by_unit_and_not_by_parameter(strategy):
    few, many = (step_cost(Setup(strategy, width=width)) for width in (0, 20))
    grown = {name for name in few[0] | many[0] if few[0][name] != many[0][name]}
    assert grown <= PER_PARAMETER
    assert sum(many[0].values()) > 100
    assert many[1] == few[1] and many[2] == few[2]
    assert few[2]["aten::_foreach_copy_"] > 0


def test_host_cost_grows_with_units():
    """The counts above can tell: twice the layers cost more of everything."""
    few, many = (step_cost(Setup(ZERO_3, layers=layers)) for layers in (3, 6))
    for less, more in zip(few, many, strict=True):
        assert sum(more.values()) >= 1.5 * sum(less.values())
