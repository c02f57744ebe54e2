"""Every order that the engine asks for is needed, and a scenario sees where it is missing.

Each wait is left out once, each event is taken for an older one, each task is run on another
stream. Where that is done is found in the sources, so that no wait is forgotten here.
"""

from __future__ import annotations

import ast
import functools
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_fsdp_adapter.core.engine.engine import FsdpEngine
from megatron_fsdp_adapter.core.runtime.device import COMPUTE, GATHER, REDUCE
from megatron_fsdp_adapter.optim import residency
from megatron_fsdp_adapter.quantized import weights
from megatron_fsdp_adapter.rollout import unit_copies
from tests.lib.engine.engine_cases import built
from tests.lib.engine.recording import RaceError, RecordingRuntime, who_asks
from tests.lib.engine.scenarios import EVENTS, SCENARIOS, ZERO_1, ZERO_2, ZERO_3
from tests.lib.engine.side_streams import SIDE

CHECKS = (
    "core/engine/engine.py",
    "core/engine/gather.py",
    "core/engine/reduce.py",
    "core/engine/group.py",
    "optim/residency.py",
    "quantized/weights.py",
    "rollout/unit_copies.py",
)

Place = tuple[str, ...]
"""A module, a function of it, and in some cases that function's caller."""

SOURCES = [
    *Path(inspect.getfile(FsdpEngine)).parent.glob("*.py"),
    Path(residency.__file__),
    Path(unit_copies.__file__),
    Path(weights.__file__),
]
LOOKED_AT = [
    (ZERO_3, "steps", "steps"),
    (ZERO_1, "steps", "steps"),
    (ZERO_2, "steps", "steps"),
    (ZERO_1, "gradients_late", "gradients_late"),
    (ZERO_3, "evaluations_before_the_step", "evaluations_before_the_step"),
    (ZERO_3, "layers_skipped", "layers_skipped"),
    (ZERO_3, "weights_written", "weights_written"),
    (ZERO_1, "fp32", "weights_loaded"),
    (ZERO_3, "kept_parts", "microbatches"),
    (ZERO_3, "exports", "exports"),
    (ZERO_3, "offload", "steps"),
    (ZERO_3, "offload", "weights_loaded"),
    (ZERO_3, "offload", "layers_left_out"),
    (ZERO_3, "offload", "no_step_follows"),
    (ZERO_3, "two_instances", "microbatches"),
    (ZERO_3, "alone_scaled", "further_backwards"),
    (ZERO_3, "mxfp8", "exports"),
    (ZERO_3, "mxfp8_shown", "gathered_while_shown"),
]


def calls(*methods: str) -> list[tuple[Place, str]]:
    """Where the engine calls one of these methods of its runtime, and its first argument."""
    found = set()
    for path in SOURCES:
        for function in ast.walk(ast.parse(path.read_text())):
            if not isinstance(function, ast.FunctionDef):
                continue
            for node in ast.walk(function):
                if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                    continue
                owner = ast.unparse(node.func.value)
                if node.func.attr in methods and owner.endswith("runtime"):
                    found.add(((path.stem, function.name), ast.unparse(node.args[0])))
    return sorted(found)


ELSEWHERE = [
    # Of the host alone: without its order nothing is found (tests/core/engine/test_launches.py).
    ("launches", "compare"),
    # Of parameters that are split along another dim than 0 (tests/plain/test_fsdp2_dims.py).
    ("gather", "_release_joined"),
    # Of a step that raises, behind which the host waits for everything.
    ("residency", "give_up"),
]
"""Places that no scenario comes to, or whose order concerns no memory."""
NEEDLESS = [
    ("unit", "order_compute", "finish_updates"),  # the host has waited already
    ("gather", "_drop", "_mark_unit_stale"),  # `mark_stale` orders all gathers behind it
    ("reduce", "finish", "abandon"), ("reduce", "finish", "zero_grads"),  # as does the next filling
    ("unit", "begin_backward"),  # its event is hardly newer than the one before it
    ("weights", "catch_up"),  # behind a gather's reads of the bytes there is more of that gather
]  # fmt: skip
"""Callers whose wait no scenario needs, or places whose event may be the one before, and why."""
ORDERED_TOO = [(("weights", "catch_up"), GATHER)]
"""Work, and another stream where it is ordered as well: gathers of what it makes follow there."""


class Faulty(RecordingRuntime):
    """Does something else in one place than it is asked to: leaves out a wait, takes the event
    from before the last task, or runs a task (the first or the last one, or all) on another
    stream. `seen`: kinds and places of what it was asked."""

    def __init__(
        self, kind: str = "", place: Place = (), to: str = "", which: slice = slice(0)
    ) -> None:
        super().__init__(SIDE)
        self.fault = (kind, place)
        self.to = to
        self.which = which
        self.seen: set[tuple[str, Place]] = set()
        self.before: dict[str, Any] = {}

    def _is_there(self, kind: str) -> bool:
        frame = who_asks(3)
        here = Path(frame.f_code.co_filename).stem, frame.f_code.co_name
        asked = {(kind, here), (kind, (*here, frame.f_back.f_code.co_name))}
        self.seen |= asked
        return self.fault in asked

    def wait(self, role: str, event: Any) -> None:
        if not self._is_there("wait"):
            super().wait(role, event)

    def block(self, event: Any) -> None:
        if not self._is_there("block"):
            super().block(event)

    def record(self, role: str) -> Any:
        event = super().record(role)
        older = self.before.get(role, event)
        if role == COMPUTE:
            self.before[role] = event
        return older if self._is_there("record") else event

    def submit(self, role: str, *tasks: Any) -> None:
        moved = tasks[self.which] if self._is_there("submit") else ()
        for task in tasks:
            if role != COMPUTE:
                self.before[role] = super().record(role)
            super().submit(self.to if task in moved else role, task)

    launch = submit


def looked_at(at: tuple[str, str, str], runtime: Faulty) -> set[tuple[str, Place]]:
    strategy, scenario, event = at
    row = SCENARIOS[scenario]
    assert event in row.events, "or a wait that is gone would not be missed"
    setup = row.setup(strategy)
    with built(setup, runtime) as rig, rig.watch():
        EVENTS[event](rig)
        rig.engine.to_sharded()
    return runtime.seen


@functools.cache
def asked() -> dict[tuple[str, Place], list[tuple[str, str, str]]]:
    """Where a scenario looks at what is asked, by kind and place."""
    found: dict[tuple[str, Place], list[tuple[str, str, str]]] = {}
    for at in LOOKED_AT:
        for place in looked_at(at, Faulty()):
            found.setdefault(place, []).append(at)
    return found


def is_seen(kind: str, place: Place, *fault: Any) -> bool:
    for at in asked().get((kind, place), ()):
        try:
            looked_at(at, Faulty(kind, place, *fault))
        except RaceError:
            return True
    return False


def asking(*methods: str) -> list[Place]:
    return [place for place in dict(calls(*methods)) if place not in ELSEWHERE]


@pytest.mark.parametrize("place", asking("wait", "follow", "block"), ids="-".join)
def test_every_order_is_needed(place):
    """By each function that asks for it."""
    callers = [(kind, at) for kind, at in asked() if at[:-1] == place and kind in ("wait", "block")]
    assert callers
    for kind, at in callers:
        assert at in NEEDLESS or is_seen(kind, at), at


@pytest.mark.parametrize("place", asking("record", "follow"), ids="-".join)
def test_every_event_covers_what_was_submitted_last(place):
    assert place in NEEDLESS or is_seen("record", place)


WORK_ELSEWHERE = []
for place, role in calls("submit", "launch", "free"):
    for to in (COMPUTE, GATHER, REDUCE):
        if place not in ELSEWHERE and to != role.lower():
            WORK_ELSEWHERE.append((place, to))


def _label(one):
    return one if isinstance(one, str) else "-".join(one)


@pytest.mark.parametrize(("place", "to"), WORK_ELSEWHERE, ids=_label)
def test_work_on_another_stream_is_a_race(place, to):
    """The first of several tasks, or the last one, or all."""
    parts = (slice(1), slice(-1, None), slice(None))
    seen = any(is_seen("submit", place, to, part) for part in parts)
    assert seen or (place, to) in ORDERED_TOO


def test_memory_that_is_not_there_or_not_written_yet_is_not_read_nor_given_back_elsewhere():
    """Which no order of the engine's tells: what is left out above is seen as a race."""
    runtime = RecordingRuntime()
    flat = torch.zeros(8)
    runtime.label(flat, "b")
    with runtime.watch():
        with pytest.raises(RaceError, match=f"{GATHER} releases b, which {COMPUTE} allocated"):
            runtime.submit(GATHER, lambda: runtime.release(flat))
        runtime.release(flat)
        with pytest.raises(RaceError, match="read of b, which is released"):
            flat + 1
        runtime.allocate(flat)
        flat[:3] = 2.0
        flat[5:] = 2.0
        assert flat[:3].sum() == 6.0
        with pytest.raises(RaceError, match="not written yet"):
            flat + 1
