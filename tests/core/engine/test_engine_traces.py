"""The schedule: golden traces, issue order and counts of collectives.

A golden trace is one step, once the order of units is known: everything that is allocated,
launched, waited for and freed, in the order in which the host asks for it.
"""

from __future__ import annotations

import pytest
import torch

from megatron_fsdp_adapter.core.config import STRATEGIES
from megatron_fsdp_adapter.core.engine.wgrad import WgradProtocol
from tests.lib.engine.engine_cases import built
from tests.lib.engine.events import backward_of_last, backward_of_one_more, failing
from tests.lib.engine.scenarios import EVENTS, SCENARIOS, ZERO_0, ZERO_1, ZERO_3
from tests.lib.engine.small_model import HIDDEN, Setup
from tests.lib.engine.traces import GOLDEN, collectives, golden, schedule, steady, traced

CHECKS = ("core/engine/engine.py", "core/engine/gather.py", "core/engine/reduce.py")


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_trace(name):
    assert traced(name) == golden(name)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("event", ["layers_skipped", "backward_raises", "evaluation_between"])
def test_issue_order_is_equal_on_every_rank(strategy, event):
    traces = []
    for rank in range(3):
        setup = Setup(strategy, world=3, rank=rank, recompute="non_reentrant")
        with built(setup) as rig, rig.watch():
            EVENTS[event](rig)
        traces.append(schedule(rig.runtime))
    assert traces[0] == traces[1] == traces[2]
    assert any("all_reduce" in line or "reduce_scatter" in line for line in traces[0])


ENDS = {
    "synced": ({}, backward_of_last),
    "no_sync": ({}, backward_of_one_more),
    "no_overlap": ({"overlap": False}, backward_of_last),
}
"""Options, and the backwards of a step: what is left to be reduced when they are over differs."""


@pytest.mark.parametrize(
    ("strategy", "end"),
    [(s, end) for s in STRATEGIES for end in ENDS if end != "no_overlap" or s in (ZERO_0, ZERO_1)],
)
def test_a_rank_without_a_backward_reduces_in_the_order_of_the_others(strategy, end):
    """That of the last backward that came to its end, in which layers ran in another order than
    they are listed in."""
    found = []
    options, backward = ENDS[end]
    for runs in (True, False):
        with built(Setup(strategy, **options)) as rig, rig.watch():
            rig.model.path = [3, 1, 0, 2]
            rig.step()
            rig.zero()
            with failing(rig, "backward 1"):
                rig.forward(0)
                rig.backward()
            rig.zero()
            if runs:
                backward(rig, 0)
            else:
                rig.sync(wait=True)
            rig.finish()
        lines = schedule(rig.runtime)
        found.append([line for line in lines if line.startswith(("reduce all_r", "reduce reduce"))])
    assert found[0] == found[1]
    assert len(found[0]) >= 14


def test_evaluations_before_and_after_a_forward_delay_no_reduction():
    """Of units that keep gradients, and of those that do not."""
    found = []
    for evaluates in (False, True):
        with built(SCENARIOS["kept"].setup(ZERO_3)) as rig, rig.watch():
            rig.step()
            rig.zero()
            if evaluates:
                rig.evaluate()
            rig.forward(0)
            if evaluates:
                rig.evaluate()
            rig.backward()
        found.append(
            [
                line
                for line in schedule(rig.runtime)
                if line.startswith(("reduce ", "compute backward "))
            ]
        )
    assert found[0] == found[1]


def test_gradients_of_inputs_alone_through_fused_weight_gradients_are_an_error():
    with built(Setup(fused=WgradProtocol.OVERWRITES)) as rig:
        x = torch.ones(2, HIDDEN, dtype=rig.setup.dtype, requires_grad=True)
        loss = rig.model.layers[1](x).float().sum()
        with pytest.raises(RuntimeError, match="Set gradient_accumulation_fusion=False"):
            torch.autograd.grad(loss, x)
        rig.step()


@pytest.mark.parametrize("recompute", ["reentrant", "non_reentrant", "selective"])
def test_recomputing_gathers_nothing_more(recompute):
    plain = collectives(steady(Setup(ZERO_3), microbatches=2))
    assert collectives(steady(Setup(ZERO_3, recompute=recompute), microbatches=2)) == plain
