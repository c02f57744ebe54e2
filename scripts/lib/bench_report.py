"""The reports of `benchmark.py`: a table, and JSON."""

from __future__ import annotations

import dataclasses
import json
import math
import platform
import statistics
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from lib.bench_measure import Result
from lib.bench_subjects import parse_subjects
from lib.bench_trace import budget_text
from lib.data import padded_vocab_size
from lib.options import Options

TOLERANCE = {True: 2e-2, False: 1e-4}
"""Largest allowed deviation of a loss, relative to the first loss, with bf16 and without. It also
applies to the gradient norm of the first step, which all wrappers compute from equal weights."""


Spread = tuple[float, float, float, float, float]
"""Lowest, first quartile, median, third quartile, highest."""


def spread(samples: Sequence[float]) -> Spread:
    """The spread of samples. Quartiles are interpolated linearly between samples."""
    more = samples if len(samples) > 1 else [*samples, *samples]
    low, middle, high = statistics.quantiles(more, n=4, method="inclusive")
    return min(samples), low, middle, high, max(samples)


def ratio(samples: Sequence[float], base: Sequence[float]) -> float | None:
    """The median over rounds of sample divided by base; None without a base."""
    if not base:
        return None
    return statistics.median([mine / other for mine, other in zip(samples, base, strict=True)])


Deviation = tuple[float, float | None]
"""Distances from the reference wrapper: the largest of the loss over all common steps, relative to
the first loss, because later ones are near zero; and that of the gradient norm of the first step,
None if there is none."""


def deviation(result: Result, reference: Result) -> Deviation:
    """The deviation of `result` from `reference`. The floor's weights do not change, so only its
    first loss is compared."""
    common = 1 if result.subject.is_floor else None
    pairs = list(zip(result.steps[:common], reference.steps, strict=False))
    (_, norm), (start, other) = pairs[0]
    scale = max(abs(start), 1e-30)  # type: ignore[arg-type]
    apart = [abs(mine[0] - theirs[0]) / scale for mine, theirs in pairs]  # type: ignore[operator]
    loss = max(apart)
    if any(math.isnan(one) for one in apart):  # `max` may hide one
        loss = math.nan
    if norm is None or other is None:
        return loss, None
    return loss, abs(norm - other) / max(abs(other), 1e-30)


def flops_per_token(options: Options) -> int:
    """FLOPs of forward and backward for one token: 6 for each GEMM weight, and causal attention,
    half of the score matrix. The experts that a token uses and the router count; recomputation does
    not."""
    width = options.hidden_size
    heads = options.num_attention_heads
    ffn = options.ffn_hidden_size
    groups = options.num_query_groups if options.group_query_attention else heads
    matrices = 3 if options.swiglu else 2
    mlp = width * ffn * matrices
    if options.num_experts is not None:
        expert = width * options.moe_ffn_hidden_size * matrices
        mlp = options.moe_router_topk * expert + width * options.num_experts
    attention = width * options.kv_channels * (2 * heads + 2 * groups)
    scores = 2 * heads * options.kv_channels * options.seq_length // 2
    layers = options.num_layers * (attention + mlp + scores)
    return int(6 * (layers + width * padded_vocab_size(options)))


Row = dict[str, Any]
"""A result as JSON values, with `flag`: True if the wrapper trained differently. If it ran, also
`time` (a `Spread`, seconds), the ratios to the floor and to DDP (`over_floor`, `over_ddp`, medians
over rounds), `tokens_per_second`, `flops_per_second` and `deviation`."""


def rows(results: Sequence[Result], given: Namespace, options: Options) -> list[Row]:
    """Rows of the report. Losses are compared with those of DDP in the same precision if it ran,
    else with the first that trained."""
    tokens = options.micro_batch_size * options.seq_length * given.num_microbatches
    table: list[Row] = []
    for result in results:
        table.append({**dataclasses.asdict(result), "subject": result.subject.name, "flag": False})
        if result.error is not None:
            continue
        ddp, reference = _references(results, result.subject.precision)
        apart = None if reference is None else deviation(result, reference)
        rate = tokens / statistics.median(result.seconds)
        table[-1] |= {
            "time": spread(result.seconds),
            "tokens_per_second": rate,
            "deviation": apart,
            "over_floor": ratio(result.seconds, result.floor_seconds),
            "over_ddp": _over(result, ddp, given.isolated),
            "flops_per_second": rate * flops_per_token(options),
            "flag": _is_beyond(apart, TOLERANCE[options.bf16]),
        }
    return table


def _references(
    results: Sequence[Result], precision: str | None
) -> tuple[Result | None, Result | None]:
    """The results to compare with in a precision: DDP's if it ran, else None; and DDP's, else that
    of the first wrapper that trained."""
    first = None
    for one in results:
        subject = one.subject
        if one.error is not None or subject.precision != precision or subject.is_floor:
            continue
        if subject.is_ddp:
            return one, one
        first = first or one
    return None, first


def _is_beyond(apart: Deviation | None, limit: float) -> bool:
    """True if the loss or the norm deviates by more than the limit."""
    if apart is None:
        return False
    return any(one is not None and not one <= limit for one in apart)  # not-a-number is beyond, too


def _over(result: Result, ddp: Result | None, isolated: bool) -> float | None:
    """The ratio of a result to DDP's: by round if they ran in the same rounds, else that of their
    ratios to their floors, or of their medians without these; None without DDP."""
    if ddp is None:
        return None
    if not isolated or result is ddp:
        return ratio(result.seconds, ddp.seconds)
    mine = ratio(result.seconds, result.floor_seconds)
    other = ratio(ddp.seconds, ddp.floor_seconds)
    if mine is None or other is None:
        return statistics.median(result.seconds) / statistics.median(ddp.seconds)
    return mine / other


HEAD = (
    "wrapper", "ms/step", "min p25 p75 max", "x floor", "x ddp", "tok/s/rank", "TFLOP/s",
    "held GiB", "peak GiB", "reserved GiB", "host ms", "loss/norm off",
)  # fmt: skip
"""`host ms`: on a GPU, the launch times of forward and backward, and of the optimizer; else the
processor time of a step."""


def _number(value: float | None, form: str, scale: float = 1.0) -> str:
    if value is None:
        return "-"
    return format(value * scale, form)


def _cells(row: Row) -> tuple[str, ...]:
    """The cells of a row that was measured, in the order of `HEAD`."""
    low, quarter, middle, three_quarters, high = (f"{1e3 * one:.1f}" for one in row["time"])
    host = row["host"] or [statistics.median(row["cpu_seconds"])]
    off = "-"
    if row["deviation"] is not None:
        loss, norm = row["deviation"]
        off = f"{loss:.1e}/{_number(norm, '.0e')}"
    if row["flag"]:
        off += " DIFFERS"
    memory = [row["memory"].get(kind) for kind in ("held", "peak", "reserved")]
    held, peak, reserved = (_number(nbytes, ".3f", 2.0**-30) for nbytes in memory)
    return (
        row["subject"],
        middle,
        f"{low} {quarter} {three_quarters} {high}",
        _number(row["over_floor"], ".3f"),
        _number(row["over_ddp"], ".3f"),
        f"{row['tokens_per_second']:,.0f}",
        f"{row['flops_per_second'] * 1e-12:.3g}",
        held,
        peak,
        reserved,
        "+".join(f"{1e3 * one:.1f}" for one in host),
        off,
    )


def table_text(table: Sequence[Row]) -> str:
    """The aligned table, with a line for each trace and each wrapper that did not run."""
    lines = [HEAD]
    lines += [_cells(row) for row in table if row["error"] is None]
    first, *widths = (max(map(len, column)) for column in zip(*lines, strict=True))
    out = []
    for name, *others in lines:
        cells = [cell.rjust(width) for cell, width in zip(others, widths, strict=True)]
        out.append("  ".join([name.ljust(first), *cells]))
    for row in table:
        if row["trace"] is not None:
            out.append(budget_text(row["subject"], row["trace"]))
    for row in table:
        if row["error"]:
            out.append(f"{row['subject']}: not measured: {row['error']}")
    return "\n".join(out)


def write_json(
    path: Path, table: Sequence[Row], settings: Mapping[str, Any], device: torch.device
) -> None:
    """Writes the report as JSON. settings: plain values common to the rows of a table."""
    name = platform.processor()
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    machine = {"device": name, "torch": torch.__version__}
    text = json.dumps({"machine": machine, **settings, "rows": table}, indent=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def from_plain(row: Row) -> Result:
    """The `Result` of a row that was read from JSON."""
    values = {item.name: row[item.name] for item in dataclasses.fields(Result)}
    values["subject"] = parse_subjects(row["subject"])[0]
    return Result(**values)
