"""The output of a proof."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from megatron_fsdp_adapter.checkpoint.record import versions
from megatron_fsdp_adapter.megatron.options.settings import format_changes
from megatron_fsdp_adapter.tools.prove import compare
from megatron_fsdp_adapter.tools.prove.compare import ComparedRow
from megatron_fsdp_adapter.tools.prove.run import ProofPlan, narrowest
from megatron_fsdp_adapter.tools.prove.source import Recipe


def render_plan(recipe: Recipe, plan: ProofPlan) -> str:
    """The header of a proof: source, options set, sizes scaled down, and options left out."""
    shrunk = plan.shrunk
    options = shrunk.options
    lines = [
        f"proof of {recipe.source}",
        format_changes("sets", recipe.changes),
        format_changes("scaled down, only for the proof", shrunk.changes),
        "not compared",
    ]
    lines += [f"  - {line}" for line in shrunk.left_out]
    lines.append("  - fusion and overlap of the reference: it has none")
    lines.append(
        f"runs {options['data_parallel_sharding_strategy']} on {shrunk.world_size} ranks, "
        f"{plan.steps} steps of {options['microbatches']} microbatches, against Megatron's DDP "
        f"without a distributed optimizer; then saves, {plan.loaded}, {plan.more} more"
    )
    return "\n".join(lines)


def lines_of(plan: ProofPlan, rows: Sequence[ComparedRow]) -> Iterator[str]:
    """The lines of the table, one for each quantity and step, and the verdict."""
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
            yield run
        what = row.quantity
        if row.name:
            what = f"{what} of {row.compared} parameters"
        verdict = "proven " if row.holds else "DIFFERS"
        worst = f"  worst {row.name}" if row.name and row.difference else ""
        yield (
            f"  step {row.step}  {what:<34} {verdict}  {row.difference:9.2e}  of "
            f"{row.bound:8.2e}{worst}"
        )
        if not row.holds and row.remark:
            yield f"          {row.remark}"
    holds = sum(row.holds for row in rows)
    outcome = "proven" if holds == len(rows) else "DIFFERS (above)"
    yield f"doctor --prove: {holds} of {len(rows)} comparisons hold: {outcome}"


def as_values(recipe: Recipe, plan: ProofPlan, rows: Sequence[ComparedRow]) -> dict[str, Any]:
    """The results as values for JSON: the options of the run, the scaled-down ones (`small`),
    releases, and every comparison."""
    options = recipe.options.items()
    comparisons = []
    for row in rows:
        values = {**vars(row), "holds": row.holds}
        if not math.isfinite(row.difference):
            values["difference"] = "none"
        comparisons.append(values)
    return {
        "source": recipe.source,
        "options": {n: v for n, v in options if v is not None and v is not False},
        "small": {change.option: change.after for change in plan.shrunk.changes},
        "not_compared": list(plan.shrunk.left_out),
        "versions": versions(),
        "comparisons": comparisons,
        "holds": all(row.holds for row in rows),
    }
