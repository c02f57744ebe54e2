"""Plots of a step and of a curve. matplotlib is an optional dependency."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

from megatron_fsdp_adapter.models.spec import layers_of

from .prediction import Prediction
from .report import layers_run, second_step
from .search import Wanted
from .timed_runtime import COMPUTE

PARTS = {"forward": "tab:blue", "backward": "tab:orange", "optimizer": "tab:purple"}
"""Part of a step -> color of its operations on the compute stream."""
STREAMS = {"gather": "tab:green", "reduce": "tab:red"}
"""Stream -> color."""
OTHER = "tab:gray"
MANY = 4
"""Ratio of the longest to the shortest step above which the axis is logarithmic. Otherwise it
begins at 0, so that small differences look small."""


def check_matplotlib() -> None:
    """Raises ValueError if matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot: matplotlib is not installed. Install it, or use --json")


def _axes() -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(figsize=(14, 4))


def _model(first: Wanted, *others: Wanted) -> str:
    """Model, GPU and batch; the batch per GPU if batches differ."""
    same = all(one.global_batch == first.global_batch for one in others)
    batch = f"{first.global_batch if same else first.global_batch / first.gpus:,.10g}"
    return (f"{first.spec.name}, {first.machine.gpu.name}, {batch} sequences of "
            f"{first.spec.tokens:,} tokens{'' if same else ' a GPU'}")  # fmt: skip


def step_title(wanted: Wanted, one: Prediction) -> str:
    """The title of the plot of a step, with the numbers of simulated layers and microbatches."""
    chosen, timeline = one.configuration, one.timeline
    if timeline is None:
        raise ValueError("--plot: the prediction has no timeline")
    begin = second_step(timeline)
    marks = [name for name, count in timeline.program.marks if count >= begin]
    shown, every = marks.count("microbatch"), chosen.microbatches(wanted.global_batch)
    layers, stage = layers_run(timeline), len(layers_of(wanted.spec, chosen.parallel, 0))
    return (
        f"{_model(wanted)}, {chosen.gpus:,} GPUs: {chosen.name}\n"
        f"{shown} of {every} microbatches, {layers} of {stage} layers of a rank; the whole step "
        f"takes {one.ms:,.0f} ms"
    )  # fmt: skip


def plot_step(wanted: Wanted, one: Prediction, path: str) -> None:
    """Plots the simulated step: a row for each stream, with different colors for forward and
    backward."""
    title, timeline = step_title(wanted, one), one.timeline
    assert timeline is not None
    figure, axes = _axes()
    roles = list(dict.fromkeys(item.role for item in timeline.program.operations))
    named = set()
    for row, role in enumerate(roles):
        spans: dict[tuple[str, str], list[tuple[float, float]]] = {}
        for item, start, end in zip(
            timeline.program.operations, timeline.starts, timeline.ends, strict=True
        ):
            if item.role == role and timeline.begin <= start and end <= timeline.end:
                name = item.part if role == COMPUTE and item.part in PARTS else role
                name = "other kernels" if name == COMPUTE else name
                color = PARTS.get(name) or STREAMS.get(name, OTHER)
                span = (1e3 * (start - timeline.begin), 1e3 * (end - start))
                spans.setdefault((name, color), []).append(span)
        for (name, color), drawn in spans.items():
            label = "_" if name in named else name
            named.add(name)
            axes.broken_barh(drawn, (row - 0.4, 0.8), color=color, lw=0, label=label)
    axes.set_yticks(range(len(roles)), roles)
    axes.set_ylabel("stream")
    axes.set_xlabel("ms")
    axes.set_xlim(0, 1e3 * (timeline.end - timeline.begin))
    axes.set_title(title)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.savefig(path, bbox_inches="tight", dpi=120)


def plot_curve(points: Sequence[tuple[Wanted, Prediction]], path: str) -> None:
    """Plots MFU and step time against the number of GPUs."""
    if not points:
        raise ValueError("--plot: no configuration fits for any number of GPUs of --curve")
    from matplotlib import ticker

    figure, axes = _axes()
    asked = [wanted for wanted, _ in points]
    sizes = [wanted.gpus for wanted in asked]
    axes.plot(sizes, [100 * one.mfu for _, one in points], "o-", label="MFU")
    axes.set_ylim(0, 115 * max(one.mfu for _, one in points))
    axes.set_ylabel("MFU, %")
    other, seconds = axes.twinx(), [one.ms / 1e3 for _, one in points]
    other.plot(sizes, seconds, "s--", color="tab:red", label="step")
    other.set_ylabel("seconds a step")
    if max(seconds) > MANY * min(seconds):
        other.set_yscale("log")
        other.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        other.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:,g}"))
        other.yaxis.set_minor_formatter(ticker.NullFormatter())
    else:
        other.set_ylim(0, 1.5 * max(seconds))
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axes.set_xlabel("GPUs")
    axes.set_title(f"{_model(*asked)}: the best configuration of each number of GPUs")
    figure.legend(loc="upper center", bbox_to_anchor=(0.5, 0.0), ncols=2)
    figure.savefig(path, bbox_inches="tight", dpi=120)
