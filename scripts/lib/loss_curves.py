"""Loss curves of several runs: which runs there are, what they say beside each other, a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from lib.bench_subjects import Subject, parse_subjects

Log = Mapping[int, Mapping[str, Any]]
"""Iteration -> what was logged of it."""

LAST = 20
"""Steps at the end of a run whose losses are averaged."""
SMOOTH = 10
"""Steps that a point of the picture of differences is the mean of."""


@dataclass(frozen=True)
class Run:
    """One training run: a wrapper in a precision, and the seed of weights and data."""

    subject: Subject
    seed: int

    @property
    def name(self) -> str:
        return f"{self.subject.name}#{self.seed}"

    @property
    def file_name(self) -> str:
        return self.name.replace(":", "-").replace("@", "-").replace("#", "-seed")

    @property
    def is_reference(self) -> bool:
        """Whether it is ours in bf16 with Adam, of which the seeds' spread is taken."""
        is_plain = self.subject.is_ours and not self.subject.has_muon
        return is_plain and self.subject.precision == "bf16"


def parse_runs(text: str) -> list[Run]:
    """Reads "ours:optim@bf16#1,ddp@fp8w_delayed#1"; ValueError names what is not understood."""
    runs = []
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        name, _, seed = part.partition("#")
        subjects = parse_subjects(name)
        if len(subjects) != 1 or subjects[0].precision is None or not seed.isdigit():
            raise ValueError(
                f"--runs {part}: must name one wrapper, its precision and a seed, as "
                "ours:optim_grads_params@fp8w_delayed#1"
            )
        if not (subjects[0].is_ours or subjects[0].kind == "ddp") or subjects[0].is_captured:
            raise ValueError(f"--runs {part}: only ours and ddp are trained here, without graphs")
        runs.append(Run(subjects[0], int(seed)))
    if not runs:
        raise ValueError("--runs: names no run")
    return list(dict.fromkeys(runs))


_OURS = "ours:optim_grads_params"
_RECIPES = ("tensorwise", "delayed", "blockwise")
DEFAULT_RUNS = ",".join(
    [
        f"{_OURS}@bf16#1",
        *(f"{_OURS}@fp8w_{recipe}#1" for recipe in _RECIPES),
        *(f"ddp@fp8w_{recipe}#1" for recipe in _RECIPES),
        *(f"{_OURS}@bf16#{seed}" for seed in (2, 3)),
        *(f"{_OURS}@fp8w_tensorwise#{seed}" for seed in (2, 3)),
        f"{_OURS}@fp8_tensorwise#1",
    ]
)


@dataclass(frozen=True)
class Line:
    """What is told of one run. `final`: mean loss of the last steps; `validation`: at the end, None
    if there was none; `apart`: `final` less that of the reference of the same seed; `from_ddp`:
    the largest distance of a step's loss from DDP's in the same precision and seed."""

    run: Run
    steps: int
    final: float
    validation: float | None
    apart: float | None
    from_ddp: float | None


@dataclass(frozen=True)
class Summary:
    """`spread`: the largest less the smallest `final` of the reference's seeds, None of one."""

    lines: tuple[Line, ...]
    spread: float | None

    @property
    def outside(self) -> list[Run]:
        """Runs that are further from their reference than seeds are from each other."""
        if self.spread is None:
            return []
        return [
            line.run
            for line in self.lines
            if line.apart is not None and not abs(line.apart) <= self.spread
        ]


def final_loss(log: Log) -> float:
    """Mean over the last steps. ValueError for a log without any."""
    losses = [record["loss"] for _, record in sorted(log.items()) if "loss" in record]
    if not losses:
        raise ValueError("a log without losses")
    return fmean(losses[-LAST:])


def summary(logs: Mapping[Run, Log]) -> Summary:
    """Of the runs that there are."""
    finals = {run: final_loss(log) for run, log in logs.items()}
    references = {run.seed: final for run, final in finals.items() if run.is_reference}
    lines = []
    for run, log in logs.items():
        base = None if run.is_reference else references.get(run.seed)
        validation = [r["validation_loss"] for r in log.values() if "validation_loss" in r]
        lines.append(
            Line(
                run, len(log), finals[run], validation[-1] if validation else None,
                None if base is None else finals[run] - base, _from_ddp(run, logs),
            )
        )  # fmt: skip
    values = list(references.values())
    return Summary(tuple(lines), max(values) - min(values) if len(values) > 1 else None)


def _from_ddp(run: Run, logs: Mapping[Run, Log]) -> float | None:
    theirs = logs.get(Run(Subject("ddp", None, run.subject.precision), run.seed))
    if theirs is None or not run.subject.is_ours:
        return None
    mine, both = logs[run], sorted(logs[run].keys() & theirs.keys())
    distances = [abs(mine[step]["loss"] - theirs[step]["loss"]) for step in both]
    return max(distances, default=None)


def table_text(found: Summary) -> str:
    """A Markdown table, and a line about the spread."""
    rows = [
        f"| run | steps | mean loss of the last {LAST} | validation | less bf16, same seed | "
        "largest distance from DDP |",
        "|---|---|---|---|---|---|",
    ]
    for line in found.lines:
        rows.append(
            f"| {line.run.name} | {line.steps} | {line.final:.4f} | {_text(line.validation, '.4f')}"
            f" | {_text(line.apart, '+.4f')} | {_text(line.from_ddp, '.1e')} |"
        )
    if found.spread is None:
        rows.append("\nspread of the seeds of bf16: unknown, fewer than two ran")
    else:
        outside = ", ".join(run.name for run in found.outside) or "none"
        rows.append(f"\nspread of the seeds of bf16: {found.spread:.4f}; further off: {outside}")
    return "\n".join(rows)


def _text(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def smoothed(values: Sequence[float]) -> list[float]:
    """Means of `SMOOTH` neighbours, of what is there at the beginning."""
    return [fmean(values[max(0, i + 1 - SMOOTH) : i + 1]) for i in range(len(values))]


def draw(logs: Mapping[Run, Log], path: Path) -> None:
    """Losses, and losses less those of the reference with the same seed, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 5))
    references = {run.seed: log for run, log in logs.items() if run.is_reference}
    for run, log in logs.items():
        steps = sorted(step for step, record in log.items() if "loss" in record)
        style = "k-" if run.is_reference else "--" if run.subject.kind == "ddp" else "-"
        left.plot(steps, [log[n]["loss"] for n in steps], style, linewidth=0.8, label=run.name)
        base = references.get(run.seed)
        if base is None or run.is_reference:
            continue
        both = [step for step in steps if step in base]
        apart = smoothed([log[n]["loss"] - base[n]["loss"] for n in both])
        right.plot(both, apart, style, linewidth=0.9, label=run.name)
    found = summary(logs)
    if found.spread is not None:
        right.axhspan(-found.spread, found.spread, color="0.9", label="spread of bf16's seeds")
    left.set(xlabel="step", ylabel="training loss (nats per byte)")
    right.set(xlabel="step", ylabel=f"less bf16 of the same seed, mean of {SMOOTH} steps")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=6)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)
