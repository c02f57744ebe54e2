"""The output of a proof."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from megatron_fsdp_adapter.checkpoint.record import versions
from megatron_fsdp_adapter.megatron.options.settings import format_changes
from megatron_fsdp_adapter.prove import compare
from megatron_fsdp_adapter.prove.compare import Row
from megatron_fsdp_adapter.prove.run import Plan, narrowest
from megatron_fsdp_adapter.prove.source import Recipe

REFERENCES: Mapping[str, str] = {
    "unsharded": "one unsharded rank that computes all ranks' microbatches",
    "ddp": "Megatron's DDP without a distributed optimizer, on the same ranks",
}


def render_plan(recipe: Recipe, plan: Plan) -> str:
    """The header of a proof: source, options set, sizes scaled down, and options left out."""
    o = plan.shrunk.options
    lines = [
        f"proof of {recipe.source}",
        format_changes("sets", recipe.changes),
        format_changes("scaled down, only for the proof", plan.shrunk.changes),
        "not compared",
        *(f"  - {line}" for line in plan.shrunk.left_out),
        *(["  - fusion and overlap of the reference: it has none"]),
    ]
    if plan.splits_model:
        lines.append("  - a load on one rank: the model is split")
    lines.append(
        f"runs {o['data_parallel_sharding_strategy']} on {plan.shrunk.world_size} ranks, "
        f"{plan.steps} steps of {o['microbatches']} microbatches, against "
        f"{REFERENCES[plan.kind]}; then saves, loads ({', '.join(plan.loads)}), {plan.more} more"
    )
    return "\n".join(lines)


def render(plan: Plan, rows: Sequence[Row]) -> str:
    """The table, one line for each quantity and step, and the verdict."""
    return "\n".join(_lines(plan, rows))


def _lines(plan: Plan, rows: Sequence[Row]) -> Iterator[str]:
    dtype = narrowest(plan.shrunk.options)
    factors = ", ".join(f"{name} {value:g}" for name, value in compare.FACTORS[dtype].items())
    yield (
        f"differences, relative; bound in step n: n x {compare.EPS[dtype]:.2e} (eps of {dtype}) x "
        f"factor ({factors}); weights as loaded: equal bits"
    )
    run = None
    for row in rows:
        if row.run != run:
            run = row.run
            yield f"{run}"
        what = f"{row.quantity} of {row.compared} parameters" if row.name else row.quantity
        verdict = "proven " if row.holds else "DIFFERS"
        worst = f"  worst {row.name}" if row.name and row.difference else ""
        yield (
            f"  step {row.step}  {what:<34} {verdict}  {row.difference:9.2e}  of "
            f"{row.bound:8.2e}{worst}"
        )
        if not row.holds and row.remark:
            yield f"          {row.remark}"
    cause = compare.conclusion(rows)
    if cause is not None:
        yield cause


def verdict(rows: Sequence[Row]) -> str:
    """The table in one line."""
    holds = sum(row.holds for row in rows)
    said = "proven" if holds == len(rows) else "DIFFERS (above)"
    return f"doctor --prove: {holds} of {len(rows)} comparisons hold: {said}"


def as_values(recipe: Recipe, plan: Plan, rows: Sequence[Row]) -> dict[str, Any]:
    """The results as JSON values: the options of the run, the scaled-down sizes (`small`),
    releases, and every comparison."""
    asked = {n: v for n, v in recipe.options.items() if v is not None and v is not False}
    return {
        "source": recipe.source,
        "options": {name: plain(value) for name, value in asked.items()},
        "small": {change.option: plain(change.after) for change in plan.shrunk.changes},
        "not_compared": list(plan.shrunk.left_out),
        "versions": versions(),
        "comparisons": [
            {name: plain(value) for name, value in {**vars(row), "holds": row.holds}.items()}
            for row in rows
        ],
        "holds": all(row.holds for row in rows),
    }


def plain(value: Any) -> Any:
    """`value` as a JSON value."""
    if isinstance(value, (bool, int, str)) or value is None:
        return value
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else str(value)
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return str(value)
