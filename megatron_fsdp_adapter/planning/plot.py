"""Pictures of a step and of a curve. matplotlib is no requirement of this package."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

from .prediction import Prediction

COLOURS = {"compute": "tab:blue", "gather": "tab:green", "reduce": "tab:red"}


def check_matplotlib() -> None:
    """ValueError where it is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot: matplotlib is not installed; install it, or use --json")


def _axes() -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(figsize=(14, 4))


def plot_step(one: Prediction, path: str) -> None:
    """One step: a row for each stream. Of a model of many layers, the few that were run."""
    timeline = one.timeline
    if timeline is None:
        raise ValueError("--plot: there is no timeline")
    figure, axes = _axes()
    roles = list(dict.fromkeys(item.role for item in timeline.program.operations))
    for row, role in enumerate(roles):
        spans = [
            (1e3 * (start - timeline.begin), 1e3 * (end - start))
            for item, start, end in zip(
                timeline.program.operations, timeline.starts, timeline.ends, strict=True
            )
            if item.role == role and timeline.begin <= start and end <= timeline.end
        ]
        axes.broken_barh(spans, (row - 0.4, 0.8), color=COLOURS.get(role, "tab:gray"), lw=0)
    axes.set_yticks(range(len(roles)), roles)
    axes.set_xlabel("ms")
    axes.set_title(f"{one.configuration.name}: the layers that were run")
    figure.savefig(path, bbox_inches="tight", dpi=120)


def plot_curve(points: Sequence[tuple[int, Prediction]], path: str) -> None:
    """MFU and time of a step against the number of GPUs."""
    if not points:
        raise ValueError("--plot: no number of GPUs of --curve has a configuration that fits")
    figure, axes = _axes()
    sizes = [gpus for gpus, _ in points]
    axes.plot(sizes, [100 * one.mfu for _, one in points], "o-", label="MFU, %")
    other = axes.twinx()
    other.plot(sizes, [one.ms for _, one in points], "s--", color="tab:red", label="ms a step")
    other.set_yscale("log")
    axes.set_xscale("log", base=2)
    axes.set_xlabel("GPUs")
    figure.legend()
    figure.savefig(path, bbox_inches="tight", dpi=120)
