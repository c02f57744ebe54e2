"""Core's `OptimizerParamScheduler` over optimizers of ours: which schedule a resumed run has.

A load of the optimizer comes before that of the scheduler, and needs the scheduler's flags: core
puts the bounds of the learning rate into parameter groups, too (`group_options.py`). So the
scheduler leaves its flags with the optimizer when it is made. This works without Megatron-LM's
arguments.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from ...core.problems import RefusedByAllRanks, raise_problems
from ..compat.patches import Original
from ..inner_module import our_chunks
from ..options.rules import is_on
from .group_options import NEITHER, OVERRIDE, USE_CHECKPOINT, differences, schedule_remarks

_SCHEDULE = "_fsdp_schedule"
"""Attribute of an optimizer: the flag of its scheduler."""


def schedule_of(optimizer: Any) -> str:
    """The flag that says whose schedule a resumed run has; `NEITHER` before a scheduler is made."""
    return getattr(optimizer, _SCHEDULE, NEITHER)


def _ours(optimizer: Any) -> list[Any]:
    """The distributed optimizers with chunks of ours that an optimizer of core consists of."""
    parts = getattr(optimizer, "chained_optimizers", (optimizer,))
    return [part for part in parts if our_chunks(part)]


def require_same_schedule(scheduler: Any, saved: Mapping[str, Any]) -> None:
    """One ValueError that lists each value of a checkpoint's schedule that differs from the
    scheduler's, with flags, if no flag of the scheduler says which schedule is taken."""
    require_same_values(scheduler.state_dict(), saved, flag_of(scheduler))


def require_same_values(wanted: Mapping[str, Any], saved: Mapping[str, Any], flag: str) -> None:
    """`require_same_schedule` for the values of a scheduler, and its flag."""
    if flag == NEITHER:
        found = differences(wanted, saved)
        raise_problems("The checkpoint's schedule", found, RefusedByAllRanks)


def flag_of(options: Any) -> str:
    """The flag of a scheduler, or of the options that one is made of."""
    for name in (OVERRIDE, USE_CHECKPOINT):
        if is_on(options, name):
            return name
    return NEITHER


# In the place of core's functions (`compat/table.py`).


def _init(original: Original, self: Any, *args: Any, **kwargs: Any) -> None:
    """Makes the scheduler, and leaves its flag with the optimizers of ours."""
    original(self, *args, **kwargs)
    for part in _ours(self.optimizer):
        setattr(part, _SCHEDULE, flag_of(self))


def _load(original: Original, self: Any, state_dict: dict[str, Any]) -> None:
    """Loads a schedule; rank 0 prints what changes. Where no flag says which one is taken, core
    asserts that each value is the same. Here one ValueError lists all that differ, with flags."""
    if _ours(self.optimizer):
        require_same_schedule(self, state_dict)
        if dist.get_rank() == 0:
            for line in schedule_remarks(self.state_dict(), state_dict, flag_of(self)):
                print(f"schedule: {line}", flush=True)
    original(self, state_dict)
