"""Chooses the units that stay unsharded over the microbatches of a step, within a budget of bytes.

With weights and gradients sharded each microbatch gathers a unit twice and reduces it once. Kept
weights are gathered once a step, kept gradients are reduced once a step; both take memory. A byte
of kept weights saves more than one of kept gradients, which are mostly float32. So weights are kept
in as many units as fit, then gradients.

The order of units:

- The root is first, as it is gathered throughout a pass anyway.
- For weights, units that are gathered twice in a microbatch follow. Those that are gathered once
  are last: an embedding, whose backward reads no weights, and the last unit of the forward, which
  stays gathered for its backward.
- For gradients, the first units follow: they are reduced last, when no compute hides it.

A unit that does not fit is left out, and smaller ones after it are tried.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ..core.config import STRATEGIES, EngineConfig, Strategy, count_sharded
from ..core.engine.group import laid_out, splits_outer
from ..core.engine.partition import UnitPlan
from ..core.layout.group import GroupLayout
from ..core.topology import Domains
from .memory import BACKWARD_TO_STEP, LIFE, PERSISTENT, Precision, unit_bytes

BUDGET_OPTION = "fsdp_unsharded_budget_gib"
AUTO = "auto"
"""The value of the option with which the budget is found while training (`auto_budget.py`)."""
GIB = 1 << 30

NO_BUDGET = f"it must be a number of GiB of at least 0, or {AUTO!r}. Use one of them"
NOTHING_TO_KEEP = (
    "this strategy shards neither gradients nor weights. Use 'optim_grads_params' or "
    "'optim_grads', or set it to 0"
)

KEEPING = ("optim_grads", "optim")
"""Strategies of units that keep something: weights, then weights and gradients."""


class OwnGroup(NamedTuple):
    """A group of a unit that keeps nothing in addition."""

    layout: GroupLayout
    # The strategy of its domain.
    row: Strategy
    # Into how many parts an outer axis splits each shard.
    parts: int = 1


@dataclass(frozen=True)
class UnshardedUnits:
    """The choice. rows: the strategy of each unit, in order; nbytes: the additional bytes on every
    rank."""

    rows: tuple[Strategy, ...]
    nbytes: int

    @property
    def weights(self) -> int:
        """Number of units that keep weights."""
        return sum(not row.shard_weights for row in self.rows)

    @property
    def grads(self) -> int:
        """Number of units that keep gradients."""
        return sum(not row.shard_grads for row in self.rows)

    def described(self, gib: str) -> str:
        """The choice in words. gib: the budget."""
        return (
            f"unsharded over a step: weights of {self.weights} and gradients of {self.grads} of "
            f"{len(self.rows)} units, for {self.nbytes / GIB:.3f} of {gib} GiB"
        )


def policy_precision(config: EngineConfig) -> Precision:
    """The inputs of the formula for memory from an engine's configuration."""
    policy = config.policy
    return Precision(
        policy.main_params_dtype, policy.grads_dtype, policy.comm_dtype, offload=config.offload
    )


def is_budget(value: Any) -> bool:
    """True for a number of GiB of at least 0, and for "auto"."""
    if value == AUTO:
        return True
    return isinstance(value, (int, float)) and math.isfinite(value) and value >= 0


def can_keep(strategy: Strategy) -> bool:
    """True if units of this strategy could keep something: gradients at least are sharded."""
    return strategy.shard_grads


def unit_row(unit: Sequence[OwnGroup], strategy: Strategy) -> Strategy:
    """The row of a unit that keeps nothing in addition: that of the group that shards most;
    `strategy` for a unit without groups."""
    return max((group.row for group in unit), key=count_sharded, default=strategy)


def unsharded_units(
    units: Sequence[Sequence[OwnGroup]],
    strategy: Strategy,
    precision: Precision,
    budget: int,
    forward_only: Collection[int] = (),
    keeping: Sequence[str] = KEEPING,
) -> UnshardedUnits:
    """Chooses the units that stay unsharded, within `budget` bytes.

    The choice is the same on every rank that has these layouts: the additional bytes of a unit do
    not depend on the rank.

    Args:
        units: each unit's groups, the root's last.
        strategy: of units without groups.
        forward_only: numbers of units whose backward reads no weights.
        keeping: the strategies that a unit may get instead, in this order.

    Raises:
        ValueError: a negative budget.
    """
    if budget < 0:
        raise ValueError(f"{BUDGET_OPTION}: {budget} bytes. Use 0 or more")
    rows = [unit_row(unit, strategy) for unit in units]
    left = budget
    if not budget or not any(map(can_keep, rows)):
        return UnshardedUnits(tuple(rows), 0)
    root = len(units) - 1
    # Units whose weights are gathered once a microbatch; `root - 1` is the forward's last one.
    once = {*forward_only, root - 1}
    for name in keeping:
        row = STRATEGIES[name]
        order = list(range(root))
        if row.shard_grads:  # weights are kept
            order.sort(key=lambda number: number in once)
        for number in [root, *order]:
            unit = units[number]
            if not unit or not _keeps_more(row, rows[number]):
                continue
            cost = _held(unit, row, precision) - _held(unit, rows[number], precision)
            if cost <= left:
                rows[number] = row
                left -= cost
    return UnshardedUnits(tuple(rows), budget - left)


def with_unsharded_units(
    plans: Sequence[UnitPlan], config: EngineConfig, domains: Domains, budget: int
) -> tuple[list[UnitPlan], UnshardedUnits]:
    """The `plans`, changed so that some units stay unsharded over a step, for `budget` bytes; and
    which units these are. The budget is not spent on domains that stay whole anyway."""
    plans = laid_out(plans, domains, config)
    units = []
    forward_only = []
    for at, plan in enumerate(plans):
        unit = []
        for key, layout in plan.layouts.items():
            if key.domain not in config.whole:
                own = config.of_domain(key.domain)
                domain = domains[key.domain]
                parts = domain.outer_size if splits_outer(domain, own) else 1
                unit.append(OwnGroup(layout, own.strategy, parts))
        units.append(unit)
        if not plan.backward_reads_weights:
            forward_only.append(at)
    precision = policy_precision(config)
    kept = unsharded_units(units, config.strategy, precision, budget, forward_only)
    found = []
    for plan, unit, row in zip(plans, units, kept.rows, strict=True):
        strategy = plan.strategy if row == unit_row(unit, config.strategy) else row
        found.append(replace(plan, strategy=strategy))
    return found, kept


def _keeps_more(row: Strategy, present: Strategy) -> bool:
    """True if `row` keeps one thing more than `present`: weights, or gradients where weights are
    kept already."""
    if row.shard_grads:
        return present.shard_weights
    return present.shard_grads and not present.shard_weights


def _held(unit: Sequence[OwnGroup], row: Strategy, precision: Precision) -> int:
    """Bytes of a unit from one microbatch to the next: what it keeps through a step."""
    lives = (PERSISTENT, BACKWARD_TO_STEP)
    total = 0
    for group in unit:
        present = min(row, group.row, key=count_sharded)
        held = unit_bytes([group.layout], present, precision, rank=0, parts=group.parts)
        total += sum(count for kind, count in held.items() if LIFE[kind] in lives)
    return total
