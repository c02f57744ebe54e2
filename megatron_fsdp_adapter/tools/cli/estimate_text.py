"""The report of `estimate` as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_fsdp_adapter.build.description import aligned
from megatron_fsdp_adapter.plan.memory import LIFE
from megatron_fsdp_adapter.plan.unsharded_budget import GIB
from megatron_fsdp_adapter.tools.models.spec import DENSE, EXPERT

from .output import Report

TOTALS = {
    "held between steps": "between_steps",
    "held at most": "peak",
}
"""Total rows of the report -> their names in `estimate`'s values."""


def render(report: Report, memory_gib: float | None) -> str:
    """The report as text."""
    quantized = f", {report['quantized']}" if report["quantized"] else ""
    experts = f", experts {report['experts']}" if report["experts"] else ""
    lines = [
        f"{report['parameters']:,} parameters, {report['params_dtype']} compute weights"
        f"{quantized}, data-parallel size {report['num_shards']:,}{_replicas(report)}{experts}"
        f"{_split(report)}"
    ]
    lines += [f"not counted: {line}" for line in report["not_counted"]]
    lines += report["remarks"]
    lines.append("")
    lines.append(f"GiB on rank {report['rank']} (activations not counted):")
    lines += aligned(_strategy_rows(report["strategies"], memory_gib))
    return "\n".join(lines)


def _replicas(report: Report) -> str:
    """The replicas, if there are several of anything."""
    replicas = report["replicas"]
    dense = replicas[DENSE]
    experts = replicas[EXPERT]
    if dense == experts:
        return f" in {dense} replicas" if dense > 1 else ""
    return f" in {dense} replicas, of experts {experts}"


def _split(report: Report) -> str:
    """The model-parallel sizes above 1."""
    split = report["split"]
    words = [
        f"{kind} {split[kind]}" for kind in ("tensor", "pipeline", "expert") if split[kind] > 1
    ]
    if split["pipeline"] > 1:
        words.append(f"stage {split['stage']}, which holds most")
    return f"; model parallel: {', '.join(words)}" if words else ""


def _strategy_rows(
    strategies: Mapping[str, Any], memory_gib: float | None
) -> list[tuple[str, ...]]:
    """The rows of the table: a column for each strategy, after the kind of memory and its life."""
    found = list(strategies.values())
    rows: list[tuple[str, ...]] = [("kind", "life", *strategies)]
    by_kind = [entry["bytes"] for entry in found]
    for kind, life in LIFE.items():
        if any(kind in held for held in by_kind):
            cells = [_gib(held.get(kind, 0)) for held in by_kind]
            rows.append((kind, life, *cells))
    for title, key in TOTALS.items():
        cells = [_gib(entry[key]) for entry in found]
        rows.append((title, "", *cells))
    if any("kept" in entry for entry in found):
        for what in ("weights", "gradients"):
            cells = [str(entry["kept"][what]) for entry in found]
            rows.append((f"units with {what} unsharded over a step", "", *cells))
    if memory_gib is not None:
        cells = ["yes" if entry["fits"] else "no" for entry in found]
        rows.append(("fits before activations", f"{memory_gib:g} GiB", *cells))
    return rows


def _gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.3f}"
