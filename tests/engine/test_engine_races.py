"""The engine under the recording runtime: no access is unordered, and every order is needed."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_fsdp_adapter.core.config import STRATEGIES
from megatron_fsdp_adapter.core.engine import gather, group, reduce
from megatron_fsdp_adapter.core.engine.engine import FsdpEngine
from megatron_fsdp_adapter.core.runtime.device import COMPUTE, GATHER, REDUCE
from tests.engine.engine_cases import Setup, build
from tests.engine.engine_scenarios import SCENARIOS, VARIANTS, variant_cells
from tests.engine.pretended import pretended_world
from tests.engine.recording import MARK, RaceError, RecordingRuntime, who_asks

ZERO_1, ZERO_2, ZERO_3 = "optim", "optim_grads", "optim_grads_params"
VARIANT_SCENARIOS = ("microbatches", "evaluation_between", "layer_twice", "backward_raises")


def run(setup: Setup, scenario: str, runtime: Any = None) -> RecordingRuntime:
    with pretended_world(setup.world, setup.rank):
        rig = build(setup, runtime)
        with rig.watch():
            SCENARIOS[scenario](rig)
        return rig.runtime


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_access_is_ordered(strategy, scenario):
    run(Setup(strategy), scenario)


@pytest.mark.parametrize(
    ("strategy", "variant"), variant_cells(name for name in VARIANTS if name != "untied")
)
def test_every_access_is_ordered_in_variants(strategy, variant):
    for scenario in VARIANT_SCENARIOS:
        run(Setup(strategy, **VARIANTS[variant]), scenario)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("world", [1, 3])
def test_worlds_of_other_sizes_and_main_weights_in_place(strategy, world):
    run(Setup(strategy, world=world, rank=world - 1, dtype=torch.float32), "evaluation_between")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_wrappers_on_one_runtime(strategy):
    """As with virtual pipeline stages: both wrappers share the device's streams."""
    with pretended_world(2):
        one = build(Setup(strategy, layers=2))
        two = build(Setup(strategy, layers=3), one.runtime)
        with one.watch():
            for _ in range(2):
                for rig in (one, two):
                    rig.zero()
                (one.loss(0) + two.loss(1)).backward()
                for rig in (two, one):
                    rig.finish()
                for rig in (one, two):
                    rig.optimizer_step()
                    rig.sync(wait=False)


def hybrid_far_ahead(strategy: str) -> Setup:
    """Instances hold parts of a shard; two layers are gathered ahead of the one that computes."""
    layer_bytes = 1280
    return Setup(
        strategy, outer=2, shard_outer=True, world=4, rank=1, prefetch_bytes=2 * layer_bytes
    )


def outer_gather_on(role: str) -> Callable[[Any, Any], Any]:
    """A fault: the gather over the outer axis runs on `role`, which nothing orders before what is
    gathered next."""
    gather_outer = gather.GatherPipeline._gather_outer

    def elsewhere(self: Any, unit: Any) -> Any:
        outer, self.runtime._role = self.runtime._role, role
        try:
            return gather_outer(self, unit)
        finally:
            self.runtime._role = outer

    return elsewhere


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_prefetch_reads_weights_that_the_outer_axis_has_not_gathered(strategy, monkeypatch):
    for scenario in ("evaluation_between", "weights_loaded", "steps"):
        runtime = run(hybrid_far_ahead(strategy), scenario)
    marks = [entry.what for entry in runtime.log if entry.action == MARK]
    forward = len(marks) - 1 - marks[::-1].index("forward layers.0")
    before = marks[:forward]
    early = before[len(before) - before[::-1].index("backward layers.0") :]
    assert "all_gather layers.2" in early, "two units ahead"
    for role in (COMPUTE, REDUCE):
        monkeypatch.setattr(gather.GatherPipeline, "_gather_outer", outer_gather_on(role))
        with pytest.raises(RaceError, match="without waiting for"):
            run(hybrid_far_ahead(strategy), "steps")
        monkeypatch.undo()


# The power of the recorder: each order that the engine asks for is taken away once.

Site = tuple[str, ...]
"""Names of functions, innermost first, of a call: ("follow_compute", "invalidate")."""


def _called_from(site: Site) -> bool:
    frame = who_asks(3)
    for name in site:
        if frame is None or frame.f_code.co_name != name:
            return False
        frame = frame.f_back  # type: ignore[assignment]
    return True


class Deaf(RecordingRuntime):
    """Does not wait where `site` says so. `missed` counts how often it did not."""

    def __init__(self, site: Site) -> None:
        super().__init__()
        self.site, self.missed = site, 0

    def wait(self, role: str, event: Any) -> None:
        if _called_from(self.site):
            self.missed += 1
        else:
            super().wait(role, event)


class Early(RecordingRuntime):
    """Records, where `site` says so, the state before what was submitted to the role last."""

    def __init__(self, site: Site) -> None:
        super().__init__()
        self.site, self.missed = site, 0
        self.before: dict[str, Any] = {}

    def submit(self, role: str, *tasks: Any) -> None:
        for task in tasks:
            self.before[role] = super().record(role)
            super().submit(role, task)

    launch = submit

    def record(self, role: str) -> Any:
        if _called_from(self.site) and role in self.before:
            self.missed += 1
            return self.before[role]
        return super().record(role)


class Elsewhere(RecordingRuntime):
    """Runs on `to` what `site` submits, the `number`th of each `of`."""

    def __init__(self, site: Site, number: int, of: int, to: str) -> None:
        super().__init__()
        self.site, self.number, self.of, self.to, self.missed = site, number, of, to, 0

    def submit(self, role: str, *tasks: Any) -> None:
        for task in tasks:
            place = role
            if _called_from(self.site):
                place = self.to if self.missed % self.of == self.number else role
                self.missed += 1
            super().submit(place, task)

    launch = submit


WAITS: dict[Site, tuple[str, str]] = {
    # the compute stream behind the gather of the unit that it is about to use
    ("_finish",): (ZERO_1, "steps"),
    # the release of weights behind their use
    ("_drop",): (ZERO_3, "steps"),
    # gathers behind initialization, the optimizer's writes, and those of nobody who says so
    ("follow_compute", "invalidate"): (ZERO_3, "weights_written"),
    # the optimizer's writes behind gathers that nobody waited for
    ("quiesce",): (ZERO_3, "layers_skipped"),
    # a step's writes behind gathers of an evaluation before it, which nobody used
    ("quiesce", "begin_step"): (ZERO_3, "evaluations_before_the_step"),
    # a reduction behind the filling of its bucket
    ("_launch",): (ZERO_2, "steps"),
    # a reduction of gradients that came late behind their collection
    ("_reduce_again",): (ZERO_1, "gradients_late"),
    # the release of a bucket behind its reduction
    ("_retire",): (ZERO_2, "steps"),
    # the optimizer behind reductions of kept gradients, whose buckets are never retired
    ("finish",): (ZERO_1, "steps"),
}

RECORDS: dict[Site, tuple[str, str, torch.dtype]] = {
    ("launch",): (ZERO_1, "steps", torch.bfloat16),
    # main weights are this rank's slice of the weights here, and what is gathered
    ("quiesce",): (ZERO_1, "weights_loaded", torch.float32),
    ("_launch",): (ZERO_2, "microbatches", torch.bfloat16),
    ("_reduce_again",): (ZERO_1, "gradients_late", torch.bfloat16),
    ("finish",): (ZERO_1, "steps", torch.bfloat16),
}


@pytest.mark.parametrize("site", WAITS, ids="<".join)
def test_each_wait_is_needed_and_missed(site):
    strategy, scenario = WAITS[site]
    deaf = Deaf(site)
    with pytest.raises(RaceError, match="without waiting for"):
        run(Setup(strategy), scenario, deaf)
    assert deaf.missed


@pytest.mark.parametrize("site", RECORDS, ids="<".join)
def test_each_event_covers_what_was_submitted_last(site):
    strategy, scenario, dtype = RECORDS[site]
    early = Early(site)
    with pytest.raises(RaceError, match="without waiting for"):
        run(Setup(strategy, dtype=dtype), scenario, early)
    assert early.missed


def _functions_that_wait() -> set[str]:
    """Functions of the engine's source that call `runtime.wait` or `follow`."""
    found = set()
    for path in Path(inspect.getfile(FsdpEngine)).parent.glob("*.py"):
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef):
                for node in ast.walk(function):
                    if isinstance(node, ast.Attribute) and ast.unparse(node).endswith(
                        ("runtime.wait", "runtime.follow")
                    ):
                        found.add(function.name)
    return found


def test_no_wait_of_the_engine_is_left_out_above():
    """But that for the comparison of launches, which the host alone does, and streams never:
    without it nothing is found (tests/distributed/test_launches.py); that of quantized weights,
    which are not here (tests/quantized/test_quantized_engine.py); that of domains of one rank
    (tests/engine/test_engine_whole.py); and those for updates that go on
    (tests/engine/test_engine_offload.py)."""
    elsewhere = {"compare", "catch_up", "launch", "order_compute", "_take_back"}
    assert _functions_that_wait() == {site[0] for site in WAITS} | elsewhere


@pytest.mark.parametrize(
    ("site", "number", "of", "to"),
    [
        (("launch",), 0, 2, COMPUTE),
        (("launch",), 1, 2, COMPUTE),
        (("launch",), 1, 2, REDUCE),
        (("_drop",), 0, 1, COMPUTE),
        (("_launch",), 0, 2, COMPUTE),
        (("_launch",), 1, 2, COMPUTE),
        (("_launch",), 0, 2, GATHER),
    ],
)
def test_work_on_another_stream_is_a_race(site, number, of, to):
    elsewhere = Elsewhere(site, number, of, to)
    with pytest.raises(RaceError):
        run(Setup(ZERO_3), "steps", elsewhere)
    assert elsewhere.missed


def _without(monkeypatch: Any, owner: Any, name: str, instead: Callable[..., Any]) -> None:
    assert callable(getattr(owner, name))
    monkeypatch.setattr(owner, name, instead)


def _released_before_use(self: Any, unit: Any) -> None:
    self._drop(unit)
    unit.advance(gather.Phase.GATHERING)
    unit.advance(gather.Phase.READY)


def _released_at_once(self: Any) -> None:
    for entry in self._in_flight.popleft().groups:
        entry.bucket.release()


def _bucket_on_the_reduce_stream(self: Any, unit: Any, *is_last: bool) -> None:
    for entry in unit.trainable_groups:
        self.runtime.submit(REDUCE, entry.bucket.allocate)
        entry.take_grads(accumulate=False)
    self._launch(unit.trainable_groups)


def _gaps_left(self: Any, accumulate: bool) -> None:
    targets = [v for v, p in zip(self.bucket_items, self.params, strict=True) if p.grad is not None]
    torch._foreach_copy_(targets, [p.grad for p in self.params if p.grad is not None])


def _cast_on_the_way(self: Any, reductions: Any) -> list[Any]:
    """A temporary is made on compute and dropped while the reduce stream may still read it."""
    for entry in reductions:
        for own, segment in zip(entry.outputs, entry.segments, strict=True):
            role, self.runtime._role = self.runtime._role, COMPUTE
            copy = segment.clone()
            self.runtime._role = role
            own.copy_(copy[: own.numel()])
    return []


FAULTS: dict[str, tuple[Any, str, Callable[..., Any], str]] = {
    "weights released before their use": (
        gather.GatherPipeline, "_finish",
        _released_before_use, "which is released",
    ),
    "own slice not written": (
        group.ParamGroup, "write_own_weights", lambda self: None, "not written yet",
    ),
    "other ranks' slices not gathered": (
        gather.GatherPipeline, "_all_gather", lambda self, unit: [], "not written yet",
    ),
    "bucket freed before its reduction": (
        reduce.ReducePipeline, "_retire", _released_at_once, "without waiting for reduce",
    ),
    "bucket allocated on the reduce stream": (
        reduce.ReducePipeline, "backward_done", _bucket_on_the_reduce_stream,
        "without waiting for reduce",
    ),
    "padding of the bucket not zeroed": (
        group.ParamGroup, "take_grads", _gaps_left, "not written yet",
    ),
    "a temporary crosses streams": (
        reduce.ReducePipeline, "_communicate", _cast_on_the_way, "ended on compute|without waiting",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_engine_is_caught(fault, monkeypatch):
    owner, name, instead, message = FAULTS[fault]
    _without(monkeypatch, owner, name, instead)
    with pytest.raises(RaceError, match=message):
        run(Setup(ZERO_3, root_norm=fault != "padding of the bucket not zeroed"), "steps")
