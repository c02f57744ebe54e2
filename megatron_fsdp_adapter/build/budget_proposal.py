"""Proposes `fsdp_unsharded_budget_gib="auto"` where it would help: a line after the first steps.

The first rank measures one step: how long compute waits for gathers and reductions, and what memory
is spare. It then chooses units as the option would. Waits are taken to shrink as the communicated
bytes do. What overlapping communication takes from compute is not counted. Nothing is communicated
for the figure, and no unit is changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ..core.engine.engine import FsdpEngine
from ..core.engine.launches import GATHERED, REDUCED
from ..core.runtime.wait_timer import WaitTimer
from ..plan.unsharded_budget import AUTO, BUDGET_OPTION, GIB, KEEPING, UnshardedUnits
from . import auto_budget
from .auto_budget import MEASURED, units_to_keep

WORTH = 0.02
"""Part of a step that has to be saved, or nothing is printed."""


def saved_part(engine: FsdpEngine, kept: UnshardedUnits, launched: Counter[str]) -> float:
    """The part of a step's communicated bytes that is not sent if units keep what `kept` says.

    launched: how often each launch of the step was made, by its words.
    """
    sent = 0
    saved = 0
    for unit, row in zip(engine.units, kept.rows, strict=True):
        for group in unit.groups:
            if group.is_single_rank:
                continue
            present = group.config.strategy
            gathers = launched[GATHERED.format(group.name)]
            weights = group.weights.nbytes
            reductions = launched[REDUCED.format(group.name)]
            grads = group.layout.total_numel * engine.config.policy.comm_dtype.itemsize
            sent += gathers * weights + reductions * grads
            if present.shard_weights and not row.shard_weights:
                saved += max(0, gathers - 1) * weights
            if present.shard_grads and not row.shard_grads:
                saved += max(0, reductions - 1) * grads
    return saved / max(1, sent)


class BudgetProposal:
    """A `StepBudget` that keeps nothing."""

    is_settled = True
    """No choice will change."""
    may_keep = False
    """No unit is ever kept."""

    def __init__(self) -> None:
        # Steps that have ended.
        self._ended = 0
        # Of the step that is measured.
        self._timer: WaitTimer | None = None
        # Launches of that step; None until it has ended.
        self._launched: Counter[str] | None = None
        # Bytes that were spare at its end.
        self._spare = 0
        # Nothing is measured any more.
        self.is_over = False

    def numbers(self, engine: FsdpEngine) -> Sequence[int]:
        """None. A step ends."""
        self._ended += 1
        return ()

    def choose(self, engine: FsdpEngine) -> None:
        """Measures the step that begins, or ends the measurement; prints a step later, when the
        device has passed it."""
        runtime = engine.runtime
        if self.is_over:
            return
        if self._timer is None:
            if self._ended == MEASURED:
                self._timer = WaitTimer(runtime.device)
                runtime.timer = self._timer
        elif self._launched is None:
            if self._ended > MEASURED:
                runtime.timer = None
                self._timer.stop()
                self._launched = Counter(engine.launches.log.before.latest)
                self._spare = auto_budget.spare_memory(runtime.device)
        elif self._ended > MEASURED + 1:
            self.is_over = True
            self._propose(engine, self._timer, self._launched)

    def _propose(self, engine: FsdpEngine, timer: WaitTimer, launched: Counter[str]) -> None:
        kept = units_to_keep(engine, self._spare, KEEPING)
        waited = timer.waited() / timer.seconds()
        part = saved_part(engine, kept, launched)
        gain = waited * part
        if gain < WORTH:
            return
        print(
            f"{BUDGET_OPTION}={AUTO!r} would save {gain:.0%} of a step or more; "
            f"{kept.described(f'{self._spare / GIB:.3f}')} that are spare. In step {MEASURED + 1} "
            f"compute waited for communication in {waited:.0%} of the time, and {part:.0%} of the "
            "bytes would not be sent",
            flush=True,
        )

    def forgo_grads(self, engine: FsdpEngine) -> None:
        """Nothing: no gradient is kept."""

    def pass_raised(self, engine: FsdpEngine, with_gradients: bool) -> None:
        """Gives up: the step that is measured is none."""
        engine.runtime.timer = None
        self.is_over = True
