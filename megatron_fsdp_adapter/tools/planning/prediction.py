"""The expected time of a step: the engine's program of a few layers is timed and extrapolated to
all layers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_fsdp_adapter.plan.memory import Bytes
from megatron_fsdp_adapter.tools.models.spec import ModelSpec, is_layer, layers_of

from .configurations import Configuration, groups, memory, planned, unit_numel
from .machine import Machine
from .program import Program
from .shapes import BF16, units, waits_for_longer
from .step import record_step
from .timing import EXPOSED, HOST, STEP, Window, time_windows

FEW = 4
MORE = 7
"""Numbers of layer units that are simulated. Their difference is the time of each further unit."""

LIMITS = ("optimizer", "pipeline bubble", "norm")
"""Purposes of time beside exposed collectives and waits for the host that can limit a step."""


@dataclass(frozen=True)
class Prediction:
    """The expected time and memory of a step.

    ms: of a step. spent: ms of it by purpose. memory: peak bytes by kind."""

    configuration: Configuration
    ms: float
    tokens: float
    flops: float
    spent: Mapping[str, float]
    memory: Bytes
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
        largest = ""
        most = 0.0
        for name, ms in self.spent.items():
            limits = name.startswith((EXPOSED, HOST)) or name in LIMITS
            if limits and ms > most:
                largest = name
                most = ms
        if most > 0.05 * self.ms:
            return f"{largest} {most:.0f} ms"
        return "compute"


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
    ran = [_stage(spec, chosen, machine, count, stage) for stage in stages]
    seconds, spent = max(ran, key=lambda window: window[0])
    spent = {name: 1e3 * part for name, part in spent.items()}
    hosts = max(1, chosen.gpus // machine.network.domain)
    late = 0.0
    if hosts > 1:
        late = seconds * machine.straggle * math.sqrt(2 * math.log(hosts))
    if late:
        spent["stragglers"] = 1e3 * late
    tokens = global_batch * spec.tokens
    return Prediction(
        chosen,
        ms=1e3 * (seconds + late),
        tokens=tokens,
        flops=spec.step_flops(tokens),
        spent=spent,
        memory=memory(spec, chosen, machine, count),
        peak_tflops=machine.gpu.peak_tflops,
    )


def _stage(
    spec: ModelSpec, chosen: Configuration, machine: Machine, count: int, stage: int
) -> Window:
    """Seconds of a step on a stage, and by purpose."""
    parallel = chosen.parallel
    layers = len(layers_of(spec, parallel, stage))
    run = min(count, 3 + warmup_of(chosen, stage, count))
    joined = max(unit.layers for unit in planned(spec, chosen, stage).units)
    least = FEW * joined
    most = MORE * joined
    if layers <= most:
        around, middle = _ran(spec, chosen, machine, run, stage, layers)
    else:
        few = _ran(spec, chosen, machine, run, stage, least)
        more = _ran(spec, chosen, machine, run, stage, most)
        times = (layers - most) / (most - least)
        around = _further(few[0], more[0], times)
        middle = _further(few[1], more[1], times)
    seconds, of_step = around
    each, of_middle = middle
    middles = count - run
    seconds += middles * each
    spent: dict[str, float] = {}
    for name in {**of_step, **of_middle}:  # in a fixed order, which decides ties
        spent[name] = of_step.get(name, 0.0) + middles * of_middle.get(name, 0.0)
    waits = waits_for_longer(spec, parallel, stage)
    if waits:
        waited = waits * count * each
        spent["uneven virtual stages"] = waited
        seconds += waited
    if parallel.pipeline > 1:
        bubble = (parallel.pipeline - 1) / parallel.virtual * each * (1 + waits)
        spent["pipeline bubble"] = bubble
        tokens = chosen.microbatch * spec.tokens / parallel.tensor
        sent = 2 * tokens * spec.hidden_size * BF16 / (machine.network.rail_gbps * 1e9)
        sends = sent * parallel.pipeline
        spent[f"{EXPOSED} pipeline sends"] = sends
        seconds += bubble + sends
    return seconds, spent


def _further(few: Window, more: Window, times: float) -> Window:
    """Extrapolates by `times` the difference of two numbers of layers beyond the larger."""

    def on(small: float, large: float) -> float:
        return max(0.0, large + (large - small) * times)

    few_seconds, of_few = few
    more_seconds, of_more = more
    spent: dict[str, float] = {}
    for name in {**of_few, **of_more}:
        spent[name] = on(of_few.get(name, 0.0), of_more.get(name, 0.0))
    return on(few_seconds, more_seconds), spent


def program_of(
    spec: ModelSpec, chosen: Configuration, microbatches: int, stage: int, layers: int
) -> Program:
    """The program of two steps of a rank of a stage, with its last `layers` layers: the first ones
    of a mixture of experts may be dense."""
    mine = units(spec, chosen.parallel, chosen.microbatch, stage)
    numbers = [unit.name for unit in mine if is_layer(unit.name)]
    left_out = set(numbers[: len(numbers) - layers])
    mine = [unit for unit in mine if unit.name not in left_out]
    warmup = warmup_of(chosen, stage, microbatches)
    return record_step(mine, chosen, microbatches, warmup, unit_numel(spec, chosen, stage))


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
    if run >= 3:
        windows = [STEP, ("microbatch", run + 1)]
    else:
        windows = [STEP, STEP]
    return time_windows(program, machine, groups(chosen, machine), windows)
