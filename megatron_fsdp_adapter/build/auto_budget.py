"""Finds the budget for unsharded units while training: `fsdp_unsharded_budget_gib="auto"`.

The first steps run as without a budget. After the last reduction of each step the ranks compare
what they have launched. The same message has the number of bytes that each rank can spare; one step
later all ranks take the smallest. A rank on which an allocation has failed proposes half of what is
in use. So there is no further collective, and no step in which the host waits for the device.

It is an object that an engine has (`FsdpEngine.budget`), under Megatron and in plain loops.

A unit that is kept this way changes no buffer. Its gathered weights are not resharded between two
microbatches, and its bucket sums the microbatches; both go when the step ends. Rebuilding units
with another strategy was rejected: optimizers and graphs hold the addresses of their shards.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from ..core.engine.engine import FsdpEngine
from ..core.engine.group import ParamGroup
from ..plan.unsharded_budget import (
    AUTO,
    BUDGET_OPTION,
    GIB,
    KEEPING,
    OwnGroup,
    UnshardedUnits,
    policy_precision,
    unsharded_units,
)

MEASURED = 2
"""Number of steps after which memory is measured. By then optimizer state is allocated, and the
memory that libraries take once."""

MARGIN = 1 / 16
"""Part of the device's memory that is never spare: fragments, and what libraries take late."""


def spare_memory(device: torch.device) -> int:
    """Bytes of the device that are left beside this process's peak and `MARGIN`; 0 on the host."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    peak = torch.cuda.max_memory_allocated(device)
    return max(0, free + reserved - peak - int(MARGIN * total))


def failed_allocations(device: torch.device) -> int:
    """Number of allocations so far for which the device had no memory, including those that
    succeeded once unused memory was given back. 0 on the host."""
    if device.type != "cuda":
        return 0
    stats = torch.cuda.memory_stats_as_nested_dict(device)
    return int(stats["num_alloc_retries"] + stats["num_ooms"])


def units_to_keep(engine: FsdpEngine, budget: int, keeping: Sequence[str]) -> UnshardedUnits:
    """Chooses what units of `engine` keep within `budget` bytes.

    keeping: the strategies that a unit may get; weights alone if some gradient cannot be kept."""
    config = engine.config
    units = []
    forward_only = []
    for unit in engine.units:
        sharded = [group for group in unit.groups if not group.is_single_rank]
        units.append([_own_group(group) for group in sharded])
        if not unit.backward_reads_weights:
            forward_only.append(unit.ordinal)
        for group in sharded:
            is_reduced = group.key.requires_grad and group.config.strategy.shard_grads
            if is_reduced and not group.grads.can_be_kept:
                keeping = KEEPING[:1]  # weights alone
    precision = policy_precision(config)
    return unsharded_units(units, config.strategy, precision, budget, forward_only, keeping)


def _own_group(group: ParamGroup) -> OwnGroup:
    parts = group.domain.outer_size if group.shards.splits_outer else 1
    return OwnGroup(group.layout, group.config.strategy, parts)


class AutoBudget:
    """Keeps units unsharded over a step as far as memory allows. An engine that has one calls
    `numbers` when ranks compare a step, `choose` between two steps, and `pass_raised`.

    sharers: number of engines on this device, one for each model chunk. Each takes an equal part of
    the spare memory.
    """

    may_keep = True
    """Units are kept."""

    def __init__(self, sharers: int = 1) -> None:
        self.sharers = sharers  # engines that share the device's memory
        # Bytes that this rank can spare.
        self.most = 0
        # Bytes that all ranks have agreed on, for the next step.
        self.agreed = 0
        # Bytes for which kept units were chosen, and bytes that these units take.
        self.chosen_for = 0
        self.used = 0
        # What units may keep.
        self._keeping: Sequence[str] = KEEPING
        # Steps that were compared, and whether the step that runs is one of them.
        self._steps = 0
        self._is_counted = False
        # Whether there were numbers to read in the comparison before.
        self._has_numbers = False
        # `failed_allocations` at the last call of `_has_failed`.
        self._failures = 0
        # A pass with gradients has raised since the last step.
        self._has_raised = False

    @property
    def is_settled(self) -> bool:
        """True once ranks have agreed on a budget, which an error may still change."""
        return bool(self.chosen_for) or self._steps > MEASURED + 1

    def numbers(self, engine: FsdpEngine) -> Sequence[int]:
        """The bytes that this rank can spare, negated: the comparison gives the largest number of
        all ranks, which is then the fewest bytes. 0 until memory is measured.

        In a plain loop several backwards of one step may each be compared. Those count as one: no
        optimizer has run between them."""
        if not self._is_counted:
            self._steps += 1
        failed = self._has_failed(engine.runtime.device)
        if self._has_numbers:
            *_, fewest = engine.launches.largest()  # of the one before, which the device has passed
            self.agreed = 0 if self._has_raised else -fewest
            self._has_raised = False
        if self._steps == MEASURED + 1 and not self._is_counted:
            self.most = spare_memory(engine.runtime.device) // self.sharers
        elif self._steps > MEASURED and failed:
            self.most = self.used // 2
        self._is_counted = True
        self._has_numbers = True
        return [-self.most]

    def _has_failed(self, device: torch.device) -> bool:
        """True if an allocation has failed since the last call."""
        before = self._failures
        self._failures = failed_allocations(device)
        return self._failures > before

    def pass_raised(self, engine: FsdpEngine, with_gradients: bool) -> None:
        """A pass was forgotten that has raised.

        - A pass with gradients raises on all ranks, or the other ranks wait for this one. Nothing
          is kept in the next step, nor in the one after it, for which the ranks agreed before the
          pass. From then on they keep what they agree on.
        - An evaluation may raise on this rank alone, after its last gather. The ranks go on to keep
          what they agree on.

        A rank that has run out of memory proposes to keep nothing.
        """
        if with_gradients:
            self.agreed = 0
            self._has_raised = True
        if self._has_failed(engine.runtime.device):
            self.most = 0

    def choose(self, engine: FsdpEngine) -> None:
        """Chooses the kept units again if the agreed budget has changed. A step begins now."""
        self._is_counted = False
        if self.agreed > self.chosen_for:
            self._keep(engine, self.agreed, "that are spare")
        elif self.agreed < self.chosen_for:
            self._keep(engine, self.agreed, "after an allocation has failed")

    def forgo_grads(self, engine: FsdpEngine) -> None:
        """Keeps weights alone from now on: the loop adds to gradients that were reduced."""
        self._keeping = KEEPING[:1]
        self._keep(engine, self.chosen_for, "in a loop that reduces in each backward")

    def _keep(self, engine: FsdpEngine, budget: int, why: str) -> None:
        # Chooses the units that are kept unsharded within `budget` bytes; rank 0 prints them.
        kept = units_to_keep(engine, budget, self._keeping)
        for unit, row in zip(engine.units, kept.rows, strict=True):
            unit.keep(row)
        if dist.get_rank() == 0:
            text = kept.described(f"{budget / GIB:.3f}")
            print(f"{BUDGET_OPTION}={AUTO!r}: {text} {why}", flush=True)
        self.chosen_for = budget
        self.used = kept.nbytes
