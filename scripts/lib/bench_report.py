"""What `benchmark.py` tells: numbers of each wrapper, a table, JSON, a bar chart."""

from __future__ import annotations

import dataclasses
import json
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lib.bench_measure import Result, as_plain
from lib.bench_subjects import FLOOR, Plan, Subject
from lib.bench_trace import Trace, budget_text, over_floor, overlap_text, time_budget_text
from lib.data import padded_vocab_size
from lib.distributed import Place
from lib.options import Options

GIB, MIB = 2**30, 2**20

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 2e-2}
"""Largest deviation of a loss, in parts of the first loss, that is not marked in the table, by
compute dtype. The norm of the first step's gradients, which all wrappers take from equal weights,
has the same."""


@dataclass(frozen=True)
class Spread:
    """Order statistics of samples."""

    median: float
    low: float
    p25: float
    p75: float
    high: float


def spread(samples: Sequence[float]) -> Spread:
    """ValueError without samples. Quartiles interpolate linearly between samples."""
    if not samples:
        raise ValueError("no samples")
    quartiles = (
        statistics.quantiles(samples, n=4, method="inclusive")
        if len(samples) > 1
        else [samples[0]] * 3
    )
    return Spread(quartiles[1], min(samples), quartiles[0], quartiles[2], max(samples))


def ratios(samples: Sequence[float], base: Sequence[float]) -> list[float]:
    """Sample over base of the same round; empty when there is no base."""
    return [mine / other for mine, other in zip(samples, base, strict=True)] if base else []


@dataclass(frozen=True)
class Deviation:
    """Largest distances from the reference wrapper: of the loss over all common steps, in parts of
    the first loss (once a model has learned its few batches, losses are near zero and say nothing
    relative to themselves), and relative of the gradient norm at the first step (None where there
    is no norm)."""

    loss: float
    norm: float | None
    steps: int

    def beyond(self, tolerance: float) -> bool:
        """True for not-a-number as well."""
        return not (self.loss <= tolerance and (self.norm is None or self.norm <= tolerance))


def deviation(result: Result, reference: Result) -> Deviation:
    """How far `result` trained from `reference`. The floor's weights stay, so its losses are
    compared at the first step alone."""
    common = 1 if result.subject.is_floor else min(len(result.steps), len(reference.steps))
    pairs = list(zip(result.steps[:common], reference.steps[:common], strict=True))
    start = max(abs(pairs[0][1][0]), 1e-30)
    loss = _largest([abs(mine[0] - other[0]) / start for mine, other in pairs])
    (_, mine), (_, other) = pairs[0]
    norm = None if mine is None or other is None else _relative(mine, other)
    return Deviation(loss, norm, common)


def _relative(value: float, reference: float) -> float:
    return abs(value - reference) / max(abs(reference), 1e-30)


def _largest(values: Sequence[float]) -> float:
    """Not-a-number if there is one: `max` would hide it."""
    return next((value for value in values if value != value), max(values))


def ddp_of(result: Result, results: Sequence[Result]) -> Result | None:
    """Megatron's DDP in the same precision, if it ran."""
    ddp = Subject("ddp", precision=result.subject.precision)
    return next((r for r in results if r.subject == ddp and r.error is None), None)


def reference_of(result: Result, results: Sequence[Result]) -> Result | None:
    """What losses are compared with: DDP in the same precision if it ran, else the first wrapper
    that trained in it."""
    able = [
        r
        for r in results
        if r.error is None
        and not r.subject.is_floor
        and r.subject.precision == result.subject.precision
    ]
    return ddp_of(result, results) or (able[0] if able else None)


def flops_per_token(options: Options) -> int:
    """Floating-point operations of forward and backward for one token: 6 for each weight of a
    matrix product, and causal attention, half of the score matrix. Of experts, those that a token
    is sent to, and the router. Recomputation is not counted."""
    width = options.hidden_size
    heads = options.num_attention_heads
    groups = options.num_query_groups if options.group_query_attention else heads
    head_width = options.kv_channels or width // heads
    ffn = options.ffn_hidden_size or 4 * width
    attention = width * head_width * (2 * heads + 2 * groups)
    matrices = 3 if options.swiglu else 2
    mlp = width * ffn * matrices
    if options.num_experts is not None:
        expert = width * (options.moe_ffn_hidden_size or ffn) * matrices
        mlp = options.moe_router_topk * expert + width * options.num_experts
    scores = 2 * heads * head_width * options.seq_length // 2
    layers = options.num_layers * (attention + mlp + scores)
    return 6 * (layers + width * padded_vocab_size(options))


@dataclass(frozen=True)
class Row:
    """One line of the table. Times in seconds; ratios to the floor and to DDP are medians over
    rounds; bytes; `flag` says that the wrapper trained differently."""

    result: Result
    time: Spread
    over_floor: float | None
    over_ddp: float | None
    tokens_per_second: float
    flops_per_second: float
    deviation: Deviation | None
    flag: bool


def rows(results: Sequence[Result], plan: Plan, options: Options) -> list[Row | Result]:
    """A `Row` for each wrapper that ran, the bare `Result` for each that did not."""
    dtype = torch.bfloat16 if options.bf16 else torch.float32
    tokens = options.micro_batch_size * options.seq_length * plan.num_microbatches
    table: list[Row | Result] = []
    for result in results:
        if result.error is not None:
            table.append(result)
            continue
        time = spread(result.seconds)
        over_floor = ratios(result.seconds, result.floor_seconds)
        reference = reference_of(result, results)
        apart = None if reference is None else deviation(result, reference)
        table.append(
            Row(
                result,
                time,
                spread(over_floor).median if over_floor else None,
                _over_ddp(result, ddp_of(result, results), plan),
                tokens / time.median,
                tokens / time.median * flops_per_token(options),
                apart,
                apart is not None and apart.beyond(TOLERANCE[dtype]),
            )
        )
    return table


def _over_ddp(result: Result, ddp: Result | None, plan: Plan) -> float | None:
    """Round by round where both ran in the same rounds, else a ratio of ratios to the floor."""
    if ddp is None:
        return None
    if not plan.isolated or result is ddp:
        return spread(ratios(result.seconds, ddp.seconds)).median
    if not result.floor_seconds or not ddp.floor_seconds:
        return spread(result.seconds).median / spread(ddp.seconds).median
    mine = spread(ratios(result.seconds, result.floor_seconds)).median
    return mine / spread(ratios(ddp.seconds, ddp.floor_seconds)).median


def unit_of(place: Place) -> int:
    """The unit of memory columns."""
    return GIB if place.device.type == "cuda" else MIB


def _bytes(count: int | None, unit: int) -> str:
    return "-" if count is None else f"{count / unit:.2f}"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _cells(row: Row, unit: int) -> list[str]:
    memory = row.result.memory
    apart = row.deviation
    return [
        row.result.subject.name,
        f"{row.time.median * 1e3:.1f}",
        " ".join(f"{v * 1e3:.1f}" for v in (row.time.low, row.time.p25, row.time.p75,
                                            row.time.high)),
        _number(row.over_floor, ".3f"),
        _number(row.over_ddp, ".3f"),
        f"{row.tokens_per_second:,.0f}",
        f"{row.flops_per_second / 1e12:.3g}",
        _bytes(memory.held if memory else None, unit),
        _bytes(memory.peak if memory else None, unit),
        _bytes(memory.reserved if memory else None, unit),
        _host(row.result),
        "-" if apart is None else f"{apart.loss:.1e}/{_number(apart.norm, '.0e')}"
        + (" DIFFERS" if row.flag else ""),
    ]  # fmt: skip


def _host(result: Result) -> str:
    """On a GPU, launching forward and backward + launching the optimizer; else processor time."""
    if result.host is not None:
        return f"{result.host[0] * 1e3:.1f}+{result.host[1] * 1e3:.1f}"
    return f"{spread(result.cpu_seconds).median * 1e3:.1f}"


def _trace_lines(result: Result, floor: Trace | None) -> list[str]:
    if result.trace is None:
        return []
    name = result.subject.name
    trace = result.trace
    lines = [budget_text(name, trace.budget), overlap_text(name, trace.overlap)]
    if trace.parts:
        lines.append(time_budget_text(name, trace.parts))
    if floor is not None and floor is not trace:
        lines.append(time_budget_text(f"{name} over floor", over_floor(trace, floor)))
    return lines


def table_text(table: Sequence[Row | Result], unit: int) -> str:
    """The table, columns aligned. `unit` is GIB or MIB."""
    name = "GiB" if unit == GIB else "MiB"
    head = [
        "wrapper", "ms/step", "min p25 p75 max", "x floor", "x ddp", "tok/s/rank", "TFLOP/s",
        f"held {name}", f"peak {name}", f"reserved {name}", "host ms", "loss/norm off",
    ]  # fmt: skip
    lines = [head, *(_cells(row, unit) for row in table if isinstance(row, Row))]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]

    def text(line: Sequence[str]) -> str:
        cells = [cell.rjust(width) for cell, width in zip(line, widths, strict=True)]
        return "  ".join([line[0].ljust(widths[0]), *cells[1:]])

    out = [text(line) for line in lines]
    measured = [row.result for row in table if isinstance(row, Row)]
    floors = {result.subject: result.trace for result in measured}
    out += [
        line
        for result in measured
        for line in _trace_lines(result, floors.get(result.subject.floor))
    ]
    out += [
        f"{row.subject.name}: not measured: {row.error}" for row in table if isinstance(row, Result)
    ]
    return "\n".join(out)


def machine(place: Place) -> dict[str, Any]:
    """Where the numbers come from."""
    on_gpu = place.device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(place.device) if on_gpu else platform.processor(),
        "ranks": place.world_size,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }


def plain_rows(table: Sequence[Row | Result]) -> list[dict[str, Any]]:
    """For JSON: samples, and what the table shows."""
    lines = []
    for row in table:
        if isinstance(row, Result):
            lines.append(as_plain(row))
            continue
        shown = dataclasses.asdict(dataclasses.replace(row, result=Result(FLOOR)))
        shown.pop("result")
        lines.append({**as_plain(row.result), **shown})
    return lines


def write_json(
    path: Path, table: Sequence[Row | Result], plan: Plan, options: Options, place: Place
) -> None:
    """Everything: options, samples, and what the table shows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "machine": machine(place),
        "plan": {**dataclasses.asdict(plan), "profile": str(plan.profile)},
        "options": options.as_dict(),
        "rows": plain_rows(table),
    }
    path.write_text(json.dumps(content, indent=1) + "\n")


def plot(path: Path, table: Sequence[Row | Result], title: str, unit: int) -> None:
    """A bar chart: ms/step with the spread, and memory. ValueError without matplotlib."""
    try:
        import matplotlib
    except ImportError as error:
        raise ValueError(
            f"--plot {path}: matplotlib is not installed: install it, or leave --plot out"
        ) from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    able = [row for row in table if isinstance(row, Row)]
    names = [row.result.subject.name for row in able]
    figure, (times, memories) = plt.subplots(1, 2, figsize=(12, 1.2 + 0.45 * len(able)))
    middle = [row.time.median * 1e3 for row in able]
    below = [(row.time.median - row.time.low) * 1e3 for row in able]
    above = [(row.time.high - row.time.median) * 1e3 for row in able]
    times.barh(names, middle, xerr=[below, above], color="tab:blue", capsize=3)
    times.set_xlabel("ms/step: median, lowest and highest round")
    peaks = [row.result.memory.peak if row.result.memory else None for row in able]
    held = [row.result.memory.held if row.result.memory else 0 for row in able]
    shown = [p if p is not None else h for p, h in zip(peaks, held, strict=True)]
    memories.barh(names, [value / unit for value in shown], color="tab:orange")
    kind = "peak allocated" if any(p is not None for p in peaks) else "held between steps"
    memories.set_xlabel(f"{kind}, {'GiB' if unit == GIB else 'MiB'}")
    for axis in (times, memories):
        axis.invert_yaxis()
        axis.grid(axis="x", alpha=0.3)
    figure.suptitle(title)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
