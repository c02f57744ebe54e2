"""The expected time of a step: the engine's program of a few layers is timed and extrapolated to
all layers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_fsdp_adapter.plan.memory import Bytes
from megatron_fsdp_adapter.tools.models.spec import ModelSpec, is_layer, layers_of

from .configurations import RESERVED, Configuration, groups, memory, planned, unit_numel
from .machine import Machine
from .program import Program
from .shapes import BF16, units, waits_for_longer
from .step import record_step
from .timing import EXPOSED, HOST, STEP, Window, time_windows

FEW = 4
MORE = 7
"""Numbers of layer units that are simulated. The two times are extrapolated to all units."""

LIMITS = ("optimizer", "pipeline bubble", "norm")
"""Purposes of time that can limit a step, beside exposed collectives and waits for the host."""

PEAK_ERROR = 0.07
"""Largest relative error of predicted peaks (docs/contributing/plan_measured.md)."""


@dataclass(frozen=True)
class Prediction:
    """The expected time and memory of a step.

    ms: of a step. tokens, flops: of a step of all GPUs. spent: ms of a step by purpose. memory:
    peak bytes by kind."""

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
        """The part of the vendor's peak that is reached, from 0 to 1."""
        return self.tflops / self.peak_tflops

    @property
    def device_bytes(self) -> int:
        """The memory that the device needs."""
        return sum(self.memory.values())

    @property
    def peak_bytes(self) -> int:
        """The maximum that torch's allocator has allocated: less than the device needs."""
        return self.device_bytes - self.memory.get(RESERVED, 0)

    def may_exceed(self, limit: float) -> bool:
        """True if the device needs more than `limit` bytes with the largest error of the peak."""
        return self.device_bytes + PEAK_ERROR * self.peak_bytes > limit

    @property
    def exposed_ms(self) -> float:
        return sum(ms for name, ms in self.spent.items() if name.startswith(EXPOSED))

    @property
    def limit(self) -> str:
        """The purpose that takes most time beside compute, with ms; "compute" if none exceeds 5% of
        the step."""
        largest = ""
        most = 0.0
        for name, ms in self.spent.items():
            can_limit = name.startswith((EXPOSED, HOST)) or name in LIMITS
            if can_limit and ms > most:
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
    timed = [_stage(spec, chosen, machine, count, stage) for stage in stages]
    seconds, spent = max(timed, key=lambda window: window[0])
    spent = {name: 1e3 * part for name, part in spent.items()}
    hosts = max(1, chosen.gpus // machine.network.domain)
    late = 0.0
    if hosts > 1:
        # About the largest of as many normally distributed times, beyond their mean.
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
    """Seconds of a step of `count` microbatches on a stage, and seconds by purpose.

    A step of few layers and microbatches is simulated; further ones count as much as its middle
    microbatch, and as the difference of two numbers of layers."""
    parallel = chosen.parallel
    layers = len(layers_of(spec, parallel, stage))
    run = min(count, 3 + warmup_of(chosen, stage, count))
    unit_layers = max(unit.layers for unit in planned(spec, chosen, stage).units)
    few_layers = FEW * unit_layers
    more_layers = MORE * unit_layers
    if layers <= more_layers:
        step, middle = _timed(spec, chosen, machine, run, stage, layers)
    else:
        few = _timed(spec, chosen, machine, run, stage, few_layers)
        more = _timed(spec, chosen, machine, run, stage, more_layers)
        times = (layers - more_layers) / (more_layers - few_layers)
        step = _further(few[0], more[0], times)
        middle = _further(few[1], more[1], times)
    seconds, of_step = step
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
    """Extrapolates the times of few and of more layers: adds their difference, `times` times, to
    those of more layers."""

    def extrapolated(small: float, large: float) -> float:
        return max(0.0, large + (large - small) * times)

    few_seconds, of_few = few
    more_seconds, of_more = more
    spent: dict[str, float] = {}
    for name in {**of_few, **of_more}:
        spent[name] = extrapolated(of_few.get(name, 0.0), of_more.get(name, 0.0))
    return extrapolated(few_seconds, more_seconds), spent


def program_of(
    spec: ModelSpec, chosen: Configuration, microbatches: int, stage: int, layers: int
) -> Program:
    """The program of two steps of a rank of a stage. Of the stage's layers it has the last `layers`
    ones, because the first ones of a mixture of experts may be dense."""
    mine = units(spec, chosen.parallel, chosen.microbatch, stage)
    names = [unit.name for unit in mine if is_layer(unit.name)]
    left_out = set(names[: len(names) - layers])
    mine = [unit for unit in mine if unit.name not in left_out]
    warmup = warmup_of(chosen, stage, microbatches)
    return record_step(mine, chosen, microbatches, warmup, unit_numel(spec, chosen, stage))


def warmup_of(chosen: Configuration, stage: int, microbatches: int) -> int:
    """Number of forwards before the first backward in the simulation, 0 or 1: with more, backwards
    and forwards would alternate in the same way afterwards."""
    return min(chosen.parallel.pipeline - 1 - stage, microbatches - 1, 1)


def _timed(
    spec: ModelSpec, chosen: Configuration, machine: Machine, run: int, stage: int, layers: int
) -> list[Window]:
    """Times the engine's program with `run` microbatches and `layers` of the stage's layers.

    Returns two windows: the whole step, and a middle microbatch; with fewer than 3 microbatches,
    which have no middle, the step once more."""
    program = program_of(spec, chosen, run, stage, layers)
    if run >= 3:
        windows = [STEP, ("microbatch", run + 1)]
    else:
        windows = [STEP, STEP]
    return time_windows(program, machine, groups(chosen, machine), windows)
