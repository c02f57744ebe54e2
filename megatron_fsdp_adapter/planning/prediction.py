"""The expected time of a step: the engine's program of a few layers is timed and extrapolated to
all layers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_fsdp_adapter.models.spec import ModelSpec, is_layer, layers_of

from .configurations import Configuration, groups, memory, planned, unit_numel
from .machine import Machine
from .program import Program
from .shapes import BF16, units, waits_for_longer
from .step import record_step
from .timing import EXPOSED, HOST, STEP, time_windows

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


@dataclass(frozen=True)
class _Stage:
    """Seconds of a stage with some number of layers: around (begin and end of a step), and of a
    middle microbatch."""

    around: float
    middle: float
    spent: Mapping[str, float]
    spent_middle: Mapping[str, float]


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
        ran = _ran(spec, chosen, machine, run, stage, layers)
    else:
        few, more = (_ran(spec, chosen, machine, run, stage, n) for n in (least, most))
        ran = _further(few, more, (layers - most) / (most - least))
    middles = count - run
    waits = waits_for_longer(spec, parallel, stage)
    bubble = (parallel.pipeline - 1) / parallel.virtual * ran.middle * (1 + waits)
    spent = {
        name: ran.spent.get(name, 0.0) + middles * ran.spent_middle.get(name, 0.0)
        for name in {**ran.spent, **ran.spent_middle}  # in a fixed order, which decides ties
    }
    seconds = ran.around + middles * ran.middle
    if waits:
        spent["uneven virtual stages"] = waits * count * ran.middle
        seconds += waits * count * ran.middle
    if parallel.pipeline > 1:
        spent["pipeline bubble"] = bubble
        tokens = chosen.microbatch * spec.tokens / parallel.context / parallel.tensor
        sent = 2 * tokens * spec.hidden_size * BF16 / (machine.network.rail_gbps * 1e9)
        spent[f"{EXPOSED} pipeline sends"] = sent * parallel.pipeline
        seconds += bubble + sent * parallel.pipeline
    return seconds, spent


def _further(few: _Stage, more: _Stage, times: float) -> _Stage:
    """Extrapolates by `times` the difference of two stages beyond the larger."""

    def on(small: float, large: float) -> float:
        return max(0.0, large + (large - small) * times)

    def each(small: Mapping[str, float], large: Mapping[str, float]) -> dict[str, float]:
        return {n: on(small.get(n, 0.0), large.get(n, 0.0)) for n in {**small, **large}}

    return _Stage(
        on(few.around, more.around), on(few.middle, more.middle), each(few.spent, more.spent),
        each(few.spent_middle, more.spent_middle),
    )


def program_of(
    spec: ModelSpec, chosen: Configuration, microbatches: int, stage: int, layers: int
) -> Program:
    """The program of two steps of a rank of a stage, with its last `layers` layers: the first ones
    of a mixture of experts may be dense."""
    mine = units(spec, chosen.parallel, chosen.microbatch, stage, chosen.quantized)
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
) -> _Stage:
    """Times the engine's program with `layers` of the stage's layers."""
    program = program_of(spec, chosen, run, stage, layers)
    where = groups(chosen, machine)
    windows = [STEP, ("microbatch", run + 1)] if run >= 3 else [STEP, STEP]
    step, middle = time_windows(program, machine, where, windows)
    return _Stage(step.seconds, middle.seconds, step.spent, middle.spent)
