"""The report of `estimate` as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_fsdp_adapter.core.layout.format import WeightFormat
from megatron_fsdp_adapter.diagnostics.description import aligned
from megatron_fsdp_adapter.diagnostics.memory import LIFE
from megatron_fsdp_adapter.planning.planned import PlannedUnit
from megatron_fsdp_adapter.sharding.unsharded_budget import GIB

TOTALS = {
    "held between steps": "between_steps",
    "and gathered ahead": "gathered_ahead",
    "held at most": "peak",
}
"""Total rows of the report -> their names in `estimate`'s values."""


def unit_rows(units: Sequence[PlannedUnit]) -> list[dict[str, Any]]:
    """Rows for the flat buffer of each group, one for all equal units, in `estimate`'s values."""
    alike: dict[int, list[PlannedUnit]] = {}
    for unit in units:
        alike.setdefault(id(unit.layouts), []).append(unit)
    return [
        {
            "unit": _title([unit.name for unit in kind], layout.format),
            "count": len(kind),
            "parameters": layout.item_numel,
            "padding": layout.padding_numel,
            "padding_fraction": layout.padding_fraction,
            "segments": [segment.numel for segment in layout.segments],
            "shard_numel": layout.shard_numel,
        }
        for kind in alike.values() for layout in kind[0].layouts
    ]


def _title(names: Sequence[str], form: WeightFormat) -> str:
    """Up to two names, or the first and the last."""
    title = ", ".join(names) if len(names) <= 2 else f"{names[0]} .. {names[-1]}"
    return f"{title}, {form.name}" if form.quantized else title


def render(report: Mapping[str, Any], weights: str, memory_gib: float | None) -> str:
    """The report as text."""
    head = (
        f"{report['parameters']:,} parameters, {weights}, "
        f"data-parallel size {report['num_shards']:,}"
    )
    units: list[tuple[str, ...]] = [
        ("unit", "count", "parameters", "padding", "", "segments", "shard")
    ]
    for unit in report["units"]:
        numbers = [f"{unit[key]:,}" for key in ("count", "parameters", "padding")]
        segments = str(len(unit["segments"]))
        fraction = f"{unit['padding_fraction']:.2%}"
        units.append((unit["unit"], *numbers, fraction, segments, f"{unit['shard_numel']:,}"))
    return "\n".join(
        [
            head,
            *(f"not counted: {line}" for line in report["not_counted"]),
            "",
            "Flat buffers, in elements, of each unit:",
            *aligned(units),
            "",
            f"GiB on rank {report['rank']} (activations not counted):",
            *aligned(_strategy_rows(report["strategies"], memory_gib)),
        ]
    )


def _strategy_rows(
    strategies: Mapping[str, Any], memory_gib: float | None
) -> list[tuple[str, ...]]:
    found = list(strategies.values())
    rows: list[tuple[str, ...]] = [("kind", "life", *strategies)]
    for kind, life in LIFE.items():
        if any(kind in entry["bytes"] for entry in found):
            rows.append((kind, life, *(_gib(entry["bytes"].get(kind, 0)) for entry in found)))
    for title, key in TOTALS.items():
        rows.append((title, "", *(_gib(entry[key]) for entry in found)))
    if any("kept" in entry for entry in found):
        for what in ("weights", "gradients"):
            counts = (str(entry["kept"][what]) for entry in found)
            rows.append((f"units with {what} unsharded over a step", "", *counts))
    if memory_gib is not None:
        limit = f"{memory_gib:g} GiB"
        rows.append(("fits", limit, *("yes" if entry["fits"] else "no" for entry in found)))
    return rows


def _gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.3f}"
