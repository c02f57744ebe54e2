"""Reading the log of a recording runtime: the schedule of steps, and what they had at once."""

from __future__ import annotations

from collections import Counter
from typing import Any

from tests.engine.engine_cases import Rig, Setup, build
from tests.engine.pretended import pretended_world
from tests.engine.recording import (
    ALLOCATE,
    MARK,
    RELEASE,
    WAIT,
    RecordingRuntime,
)

ZERO_1, ZERO_2, ZERO_3 = "optim", "optim_grads", "optim_grads_params"


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


def collectives(rig: Rig) -> Counter[str]:
    names = ("all_gather", "reduce_scatter", "all_reduce")
    return Counter(
        entry.what for entry in rig.runtime.log
        if entry.action == MARK and entry.what.split()[0] in names
    )  # fmt: skip
