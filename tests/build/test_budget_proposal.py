"""A run without a budget prints, once, what `fsdp_unsharded_budget_gib="auto"` would keep and save;
a run that would gain nothing does not."""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack, redirect_stdout
from types import MappingProxyType
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_fsdp_adapter.build.auto_budget import MEASURED
from megatron_fsdp_adapter.core.engine.launches import GATHERED, REDUCED
from megatron_fsdp_adapter.core.runtime.wait_timer import WaitTimer
from megatron_fsdp_adapter.plan.unsharded_budget import AUTO, GIB
from megatron_fsdp_adapter.plan.unsharded_budget import BUDGET_OPTION as BUDGET
from tests.lib.gpt.gpt import Case, Trainer, build_trainer, init_megatron
from tests.lib.gpt.units import ALL_GIB, KEPT_CASE, WEIGHTS_GIB
from tests.lib.gpt.variants import ZERO_1, ZERO_2, ZERO_3, train
from tests.lib.ranks.shared_ranks import on_ranks
from tests.lib.ranks.spare_memory import spare

CHECKS = ("build/budget_proposal.py", "core/runtime/wait_timer.py")

NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})
TOLD = re.compile(
    rf"{BUDGET}='auto' would save (\d+)% of a step or more; unsharded over a step: weights of "
    r"(\d+) and gradients of (\d+) of 7 units, for .* GiB that are spare. In step 3 compute waited "
    r"for communication in (\d+)% of the time, and (\d+)% of the bytes would not be sent\n"
)
STEPS = 2 * MEASURED + 2
"""The line comes before step 5; some more."""


def half_of_a_step_waits() -> ExitStack:
    """Inside, compute waits for half of a measured step."""
    stack = ExitStack()
    stack.enter_context(mock.patch.object(WaitTimer, "seconds", lambda timer: 2.0))
    stack.enter_context(mock.patch.object(WaitTimer, "waited", lambda timer: 1.0))
    return stack


def trained(
    rank: int,
    gib: float,
    strategy: str = ZERO_3,
    ddp: Mapping[str, Any] = NO_OPTIONS,
    **case: Any,
) -> tuple[Trainer, str]:
    """A model after `STEPS` steps on a host with so many GiB to spare, and what it printed."""
    with spare(int(gib * GIB)), redirect_stdout(io.StringIO()) as said:
        options = {**KEPT_CASE, **case}
        trainer = build_trainer(Case(**options), strategy, init_megatron(), ddp=ddp)
        for number in range(STEPS):
            train(trainer, number, rank)
    return trainer, said.getvalue()


SAVED = {
    # Of 3 microbatches units are gathered 6 times in bf16, two of 7 units 3 times; gradients are
    # reduced 3 times in float32. Kept ones are gathered and reduced once.
    (ALL_GIB, ZERO_3): (7, 7),
    (WEIGHTS_GIB, ZERO_3): (6, 0),
    (ALL_GIB, ZERO_2): (7, 7),
}


def bytes_sent(trainer: Trainer) -> int:
    """Bytes of all gathers and reductions of the last step, from its launches."""
    engine = trainer.wrapper.engine
    launched = Counter(engine.launches.log.before.latest)
    sent = 0
    for unit in engine.units:
        for group in unit.groups:
            numel = group.layout.total_numel
            sent += launched[GATHERED.format(group.name)] * numel * torch.bfloat16.itemsize
            sent += launched[REDUCED.format(group.name)] * numel * torch.float32.itemsize
    return sent


@pytest.mark.parametrize("gib, strategy", SAVED)
@on_ranks(2)
def test_the_first_rank_says_what_a_budget_would_save(rank: int, gib: float, strategy: str) -> None:
    with half_of_a_step_waits():
        trainer, said = trained(rank, gib, strategy)
    engine = trainer.wrapper.engine
    assert engine.runtime.timer is None
    assert (engine.budget is not None) == (rank == 0)
    assert rank > 0 or engine.budget.is_over
    found = TOLD.findall(said)
    assert len(found) == (rank == 0), said
    if rank == 0:
        gain, weights, gradients, waited, saved = map(int, found[0])
        assert (weights, gradients) == SAVED[gib, strategy]
        assert waited == 50
        assert abs(gain - saved / 2) <= 1
    with_budget, said = trained(rank, gib, strategy, {BUDGET: gib})
    assert not TOLD.search(said)
    if rank == 0:
        assert saved == round(100 - 100 * bytes_sent(with_budget) / bytes_sent(trainer))


SILENT = (
    ("nothing is spare", 0.0, ZERO_3, {}),
    ("nothing is sharded that could be kept", ALL_GIB, ZERO_1, {}),
    ("units share slots", ALL_GIB, ZERO_3, {"fsdp_double_buffer": True}),
    ("a budget is found", ALL_GIB, ZERO_3, {BUDGET: AUTO}),
)


@pytest.mark.parametrize("why, gib, strategy, ddp", SILENT, ids=[row[0] for row in SILENT])
@on_ranks(2)
def test_nothing_is_proposed_if(
    rank: int, why: str, gib: float, strategy: str, ddp: dict[str, Any]
) -> None:
    with half_of_a_step_waits():
        _, said = trained(rank, gib, strategy, ddp)
    assert "would save" not in said


@on_ranks(2)
def test_waits_are_part_of_a_step(rank: int) -> None:
    """What is measured on a host: waits are within the step, and there are some."""
    timers = []
    made = WaitTimer.__init__

    def noted(timer: WaitTimer, device: torch.device) -> None:
        made(timer, device)
        timers.append(timer)

    with mock.patch.object(WaitTimer, "__init__", noted):
        trained(rank, ALL_GIB)
    assert len(timers) == (rank == 0)
    for timer in timers:
        assert 0 < timer.waited() < timer.seconds()
