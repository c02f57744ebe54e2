"""Reading the log of a recording runtime: the schedule of steps, and what they had at once.

`python -m tests.lib.engine.traces` writes the golden traces again; a difference has to be
understood line by line before it is committed.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from tests.lib.engine.engine_cases import Rig, built
from tests.lib.engine.recording import ALLOCATE, MARK, RELEASE, WAIT, RecordingRuntime
from tests.lib.engine.scenarios import SCENARIOS, ZERO_0, ZERO_1, ZERO_2, ZERO_3
from tests.lib.engine.small_model import Setup

FOLDER = Path(__file__).parent / "golden"
GOLDEN: dict[str, tuple[str, str, int]] = {
    "no_shard": ("steps", ZERO_0, 1),
    "optim": ("steps", ZERO_1, 1),
    "optim_grads": ("steps", ZERO_2, 1),
    "optim_grads_params": ("steps", ZERO_3, 1),
    "two_microbatches_optim": ("steps", ZERO_1, 2),
    "two_microbatches_optim_grads_params": ("steps", ZERO_3, 2),
    "no_overlap": ("no_overlap", ZERO_1, 1),
    "far_prefetch": ("far_prefetch", ZERO_3, 1),
    "recompute": ("non_reentrant", ZERO_3, 1),
    "tied": ("tied", ZERO_3, 1),
    "one_unit": ("one_unit", ZERO_3, 2),
    "joined": ("joined", ZERO_3, 1),
    "instances": ("two_instances", ZERO_3, 2),
    "instances_optim": ("two_instances", ZERO_1, 2),
    "sharded_instances": ("sharded_instances", ZERO_3, 2),
    "kept": ("kept", ZERO_3, 2),
    "double_buffer": ("slots", ZERO_3, 1),
    "copy_engine": ("exchange", ZERO_3, 1),
    "fp32_sums": ("fp32_sums", ZERO_2, 1),
    "experts": ("two_domains", ZERO_3, 1),
    "experts_optim": ("two_domains", ZERO_1, 1),
    "experts_of_one_rank": ("whole", ZERO_3, 2),
    "scheduled": ("scheduled", ZERO_3, 2),
    "side_stream": ("dispatched", ZERO_3, 1),
    "offload": ("offload", ZERO_3, 1),
    "offload_optim": ("offload", ZERO_1, 1),
    "quantized": ("current", ZERO_3, 1),
    "quantized_optim": ("current", ZERO_1, 1),
    "quantized_by_direction": ("mxfp8", ZERO_3, 1),
}
"""Scenario, strategy and microbatches of a step that knows the order of units."""


def schedule(runtime: RecordingRuntime) -> list[str]:
    """The log as lines: the stream, what, and of which unit; without reads, writes and records."""
    return [
        f"{entry.role} {'' if entry.action == MARK else entry.action + ' '}{entry.what}"
        for entry in runtime.log
        if entry.action in (ALLOCATE, RELEASE, WAIT, MARK)
    ]


def steady(setup: Setup, steps: int = 1, **step: Any) -> Rig:
    """A rig whose log holds `steps` steps after two that it learned from."""
    with built(setup) as rig, rig.watch():
        for number in range(2 + steps):
            if number == 2:
                rig.runtime.log.clear()
            rig.step(**step)
    return rig


def traced(name: str) -> list[str]:
    """Of three layers, or five that are joined."""
    scenario, strategy, microbatches = GOLDEN[name]
    setup = SCENARIOS[scenario].setup(strategy)
    layers = 5 if setup.joined else 3
    return schedule(steady(setup.but(layers=layers), microbatches=microbatches).runtime)


def golden(name: str) -> list[str]:
    return (FOLDER / f"{name}.txt").read_text().splitlines()


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
        entry.what
        for entry in rig.runtime.log
        if entry.action == MARK and entry.what.split()[0] in names
    )


if __name__ == "__main__":
    for name in GOLDEN:
        (FOLDER / f"{name}.txt").write_text("\n".join(traced(name)) + "\n")
