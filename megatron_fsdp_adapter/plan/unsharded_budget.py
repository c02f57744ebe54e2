"""Chooses the units that stay unsharded over the microbatches of a step, within a budget of bytes.

With weights and gradients sharded each microbatch gathers a unit twice and reduces it once. Kept
weights are gathered once a step, kept gradients are reduced once a step; both take memory. A byte
of kept weights saves more than one of kept gradients, which are float32 mostly: so weights are kept
in as many units as fit, then gradients. The root is first, which is there throughout a pass anyway.
Then, of weights, come units that are gathered twice, and last those that are gathered once a
microbatch: an embedding, whose backward reads none, and the last one, which stays for its backward.
Of gradients those of the first units come first: they are reduced last, and nothing hides that.
What does not fit is left out, and smaller ones behind it are tried.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ..core.config import STRATEGIES, EngineConfig, Strategy
from ..core.layout.group import GroupLayout
from .memory import BACKWARD_TO_STEP, LIFE, PERSISTENT, Precision, unit_bytes

BUDGET_OPTION = "fsdp_unsharded_budget_gib"
AUTO = "auto"
"""The value of the option with which the budget is found while training (`auto_budget.py`)."""
GIB = 1 << 30

KEEPING = ("optim_grads", "optim")
"""Kinds of kept units, the one that costs least first: weights kept, gradients too."""


@dataclass(frozen=True)
class UnshardedUnits:
    """rows: the strategy of each unit, in order; nbytes: what they take more, on every rank."""

    rows: tuple[Strategy, ...]
    nbytes: int

    @property
    def weights(self) -> int:
        """Units that keep weights."""
        return sum(not row.shard_weights for row in self.rows)

    @property
    def grads(self) -> int:
        """Units that keep gradients."""
        return sum(not row.shard_grads for row in self.rows)


def policy_precision(config: EngineConfig) -> Precision:
    """The inputs of the formula for memory from an engine's configuration."""
    policy = config.policy
    return Precision(
        policy.main_params_dtype, policy.grads_dtype, policy.comm_dtype, offload=config.offload
    )


def can_keep(strategy: Strategy) -> bool:
    """True if there is anything that units of this strategy could keep."""
    return strategy.shard_grads


def unsharded_units(
    units: Sequence[Sequence[GroupLayout]],
    strategy: Strategy,
    precision: Precision,
    budget: int,
    forward_only: Collection[int] = (),
    keeping: Sequence[str] = KEEPING,
) -> UnshardedUnits:
    """units: the layouts of each unit's groups, the root's last; forward_only: those whose backward
    reads no weights; keeping: the kinds of kept units to choose from. The same on every rank that
    has these layouts: what units take more does not depend on the rank.

    Raises:
        ValueError: a negative budget.
    """
    if budget < 0:
        raise ValueError(f"{BUDGET_OPTION}: {budget} bytes. Use 0 or more")
    rows = [strategy] * len(units)
    left = budget
    if not budget or not can_keep(strategy):
        return UnshardedUnits(tuple(rows), 0)
    root = len(units) - 1
    # Their weights are gathered once a microbatch.
    once = {*forward_only, root - 1}
    for name in keeping:
        row = STRATEGIES[name]
        order = list(range(root))
        if row.shard_grads:
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


def _keeps_more(row: Strategy, present: Strategy) -> bool:
    """One step up: gradients are kept only where weights are."""
    if row.shard_grads:
        return present.shard_weights
    return present.shard_grads and not present.shard_weights


def _held(layouts: Sequence[GroupLayout], row: Strategy, precision: Precision) -> int:
    """Bytes of a unit that are there from one microbatch to the next."""
    lives = (PERSISTENT, BACKWARD_TO_STEP)
    held = unit_bytes(layouts, row, precision, rank=0)
    return sum(count for kind, count in held.items() if LIFE[kind] in lives)
