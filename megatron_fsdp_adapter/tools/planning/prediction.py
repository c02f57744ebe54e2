"""The expected time of a step: the engine's program of a few layers is timed and extrapolated to
all layers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_fsdp_adapter.tools.models.spec import ModelSpec, is_layer, layers_of

from .configurations import Configuration, groups, memory, planned, unit_numel
from .machine import Machine
from .program import Program
from .shapes import BF16, units, waits_for_longer
from .step import record_step
from .timing import EXPOSED, HOST, STEP, Window, time_windows

FEW, MORE = 4, 7
"""Numbers of layer units that are simulated. Their difference is the time of each further unit."""


@dataclass(frozen=True)
class Prediction:
    """The expected time and memory of a step.

    ms: of a step. spent: ms of it by purpose. memory: peak bytes by kind."""

    configuration: Configuration
    ms: float
    tokens: float
    flops: float
    spent: Mapping[str, float]
    memory: Mapping[str, int]
    peak_tflops: float

    @property
    def tokens_per_gpu(self) -> float:
        """Tokens per second and GPU."""
        return self.tokens / self.configuration.gpus / self.ms * 1e3

    @property
    def tflops(self) -> float:
        """TFLOP/s per GPU, as a benchmark counts them."""
        return self.flops / self.configuration.gpus / self.ms * 1e3 / 1e12

    @property
    def mfu(self) -> float:
        return self.tflops / self.peak_tflops

    @property
    def peak_bytes(self) -> int:
        return sum(self.memory.values())

    @property
    def exposed_ms(self) -> float:
        return sum(ms for name, ms in self.spent.items() if name.startswith(EXPOSED))

    @property
    def limit(self) -> str:
        """The largest purpose of time beside compute, or "compute" if none exceeds 5%."""
        others = {
            name: ms for name, ms in self.spent.items()
            if name.startswith((EXPOSED, HOST)) or name in ("optimizer", "pipeline bubble", "norm")
        }  # fmt: skip
        name, ms = max(others.items(), key=lambda entry: entry[1], default=("", 0.0))
        return f"{name} {ms:.0f} ms" if ms > 0.05 * self.ms else "compute"


def predict(
    spec: ModelSpec, chosen: Configuration, machine: Machine, global_batch: int
) -> Prediction:
    """The expected time and memory of a step.

    Raises:
        ValueError: the batch is no multiple of ranks times microbatch, or the configuration is
            invalid.
    """
    count = chosen.microbatches(global_batch)
    stages = sorted({0, chosen.parallel.pipeline - 1})
    seconds, spent = max(
        (_stage(spec, chosen, machine, count, stage) for stage in stages),
        key=lambda found: found[0],
    )
    spent = {name: 1e3 * part for name, part in spent.items()}
    hosts = max(1, chosen.gpus // machine.network.domain)
    late = seconds * machine.straggle * math.sqrt(2 * math.log(hosts)) if hosts > 1 else 0.0
    if late:
        spent["stragglers"] = 1e3 * late
    tokens = global_batch * spec.tokens
    return Prediction(
        chosen, 1e3 * (seconds + late), tokens, spec.step_flops(tokens), spent,
        memory(spec, chosen, machine, count), machine.gpu.peak_tflops,
    )  # fmt: skip


def _stage(
    spec: ModelSpec, chosen: Configuration, machine: Machine, count: int, stage: int
) -> tuple[float, dict[str, float]]:
    """Seconds of a step on a stage, and by purpose."""
    parallel, layers = chosen.parallel, len(layers_of(spec, chosen.parallel, stage))
    run = min(count, 3 + warmup_of(chosen, stage, count))
    joined = max(unit.layers for unit in planned(spec, chosen, stage).units)
    least, most = FEW * joined, MORE * joined
    if layers <= most:
        around, middle = _ran(spec, chosen, machine, run, stage, layers)
    else:
        few, more = (_ran(spec, chosen, machine, run, stage, n) for n in (least, most))
        times = (layers - most) / (most - least)
        around, middle = (_further(*two, times) for two in zip(few, more, strict=True))
    middles = count - run
    waits = waits_for_longer(spec, parallel, stage)
    bubble = (parallel.pipeline - 1) / parallel.virtual * middle[0] * (1 + waits)
    spent = {
        name: around[1].get(name, 0.0) + middles * middle[1].get(name, 0.0)
        for name in {**around[1], **middle[1]}  # in a fixed order, which decides ties
    }
    seconds = around[0] + middles * middle[0]
    if waits:
        spent["uneven virtual stages"] = waits * count * middle[0]
        seconds += waits * count * middle[0]
    if parallel.pipeline > 1:
        spent["pipeline bubble"] = bubble
        tokens = chosen.microbatch * spec.tokens / parallel.tensor
        sent = 2 * tokens * spec.hidden_size * BF16 / (machine.network.rail_gbps * 1e9)
        spent[f"{EXPOSED} pipeline sends"] = sent * parallel.pipeline
        seconds += bubble + sent * parallel.pipeline
    return seconds, spent


def _further(few: Window, more: Window, times: float) -> Window:
    """Extrapolates by `times` the difference of two numbers of layers beyond the larger."""

    def on(small: float, large: float) -> float:
        return max(0.0, large + (large - small) * times)

    names = {**few[1], **more[1]}
    spent = {name: on(few[1].get(name, 0.0), more[1].get(name, 0.0)) for name in names}
    return on(few[0], more[0]), spent


def program_of(
    spec: ModelSpec, chosen: Configuration, microbatches: int, stage: int, layers: int
) -> Program:
    """The program of two steps of a rank of a stage, with its last `layers` layers: the first ones
    of a mixture of experts may be dense."""
    mine = units(spec, chosen.parallel, chosen.microbatch, stage)
    numbers = [unit.name for unit in mine if is_layer(unit.name)]
    left_out = set(numbers[: len(numbers) - layers])
    mine = [unit for unit in mine if unit.name not in left_out]
    return record_step(
        mine, chosen, microbatches, warmup_of(chosen, stage, microbatches),
        unit_numel(spec, chosen, stage),
    )


def warmup_of(chosen: Configuration, stage: int, microbatches: int) -> int:
    """Forwards before the first backward, at most one: more would not change the alternation of
    backwards and forwards that follows."""
    return min(chosen.parallel.pipeline - 1 - stage, microbatches - 1, 1)


def _ran(
    spec: ModelSpec, chosen: Configuration, machine: Machine, run: int, stage: int, layers: int
) -> list[Window]:
    """Times the engine's program with `layers` of the stage's layers: the step (begin and end are
    in it), and a middle microbatch."""
    program = program_of(spec, chosen, run, stage, layers)
    windows = [STEP, ("microbatch", run + 1)] if run >= 3 else [STEP, STEP]
    return time_windows(program, machine, groups(chosen, machine), windows)
