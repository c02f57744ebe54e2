"""The report of `estimate` as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_fsdp_adapter.build.description import aligned
from megatron_fsdp_adapter.plan.memory import LIFE
from megatron_fsdp_adapter.plan.unsharded_budget import GIB

TOTALS = {
    "held between steps": "between_steps",
    "held at most": "peak",
}
"""Total rows of the report -> their names in `estimate`'s values."""


def render(report: Mapping[str, Any], memory_gib: float | None) -> str:
    """The report as text."""
    quantized = f", {report['quantized']}" if report["quantized"] else ""
    head = (
        f"{report['parameters']:,} parameters, {report['params_dtype']} compute weights"
        f"{quantized}, data-parallel size {report['num_shards']:,}"
    )
    return "\n".join(
        [
            head,
            *(f"not counted: {line}" for line in report["not_counted"]),
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
