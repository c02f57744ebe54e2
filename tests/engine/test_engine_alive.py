"""How many weights and buckets are alive at once."""

from __future__ import annotations

from itertools import pairwise

import pytest

from megatron_fsdp_adapter.core.engine import prefetch
from megatron_fsdp_adapter.core.engine.reduce import MAX_BUCKETS
from tests.engine.engine_cases import Rig, Setup, build
from tests.engine.engine_scenarios import SCENARIOS
from tests.engine.pretended import pretended_world
from tests.engine.traces import ZERO_2, ZERO_3, alive, steady


def weight_bytes(rig: Rig) -> dict[str, int]:
    return {unit.name: unit.weight_bytes for unit in rig.engine.units}


def neighbors(rig: Rig) -> int:
    """Bytes of the two largest units in a row, of those that use weights one after another."""
    sizes = weight_bytes(rig)
    order = [rig.engine.units[i].name for i in rig.engine.order._known[prefetch.FORWARD]]
    chain = [sizes[name] for name in order if name != "root"]
    return max(one + two for one, two in pairwise(chain))


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("recompute", [None, "reentrant", "non_reentrant", "selective"])
def test_root_and_two_units_are_gathered_at_once(recompute, microbatches):
    """The bound: the root unit (which stays from the start of forward to the end of backward), the
    unit that computes, and the next one. It is met, and never exceeded."""
    setup = Setup(ZERO_3, layers=5, recompute=recompute, width=1)
    rig = steady(setup, steps=2, microbatches=microbatches)
    history = alive(rig.runtime, "weight")
    assert max(len(units) for units in history) == 3
    assert all("root" in units for units in history if len(units) == 3)
    assert max(sum(units.values()) for units in history) == (
        weight_bytes(rig)["root"] + neighbors(rig)
    )


@pytest.mark.parametrize("strategy", [ZERO_2, ZERO_3])
@pytest.mark.parametrize(("layers", "tied"), [(5, False), (5, True), (12, False)])
def test_two_units_have_buckets_at_once(strategy, layers, tied):
    """Whatever the number of layers: what a reduction reads goes when that one has passed."""
    rig = steady(Setup(strategy, layers=layers, tied=tied), steps=2, microbatches=2)
    history = alive(rig.runtime, "bucket")
    assert max(len(units) for units in history) == MAX_BUCKETS == 2
    sizes = sorted(group.bucket.nbytes for group in rig.engine.groups)
    assert max(sum(units.values()) for units in history) <= sum(sizes[-2:])


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_bounds_hold_whatever_happens(scenario):
    """The unit that ended the last forward is kept for the backward that normally comes next. When
    that does not come next, or another layer came last, it is one more. So is a unit between its
    two backwards. A sync with `wait` gathers everything because it is told to."""
    with pretended_world(2):
        rig = build(Setup(ZERO_3, layers=6))
        with rig.watch():
            rig.step()
            rig.runtime.log.clear()
            SCENARIOS[scenario](rig)
    one_more = {"forwards_in_flight", "forward_raises", "forward_without_backward",
                "inner_module_called", "layers_skipped", "layer_again_later",
                "evaluations_before_the_step"}  # fmt: skip
    limit = len(rig.engine.units) if scenario == "steps_with_full_sync" else 3
    limit += scenario in one_more
    assert max(len(units) for units in alive(rig.runtime, "weight")) <= limit
    assert max(len(units) for units in alive(rig.runtime, "bucket")) <= 2


def test_layers_dropped_at_random_leave_no_gathers_behind():
    """Each pass is unlike the one before, so predictions fail again and again."""
    with pretended_world(2):
        rig = build(Setup(ZERO_3, layers=16))
        with rig.watch():
            for start in range(6):
                rig.model.path = [i for i in range(16) if (i * i + start) % 3]
                rig.step()
    assert max(len(units) for units in alive(rig.runtime, "weight")) <= 4


def test_between_steps_nothing_transient_is_alive():
    with pretended_world(2):
        rig = build(Setup(ZERO_3))
        with rig.watch():
            for _ in range(2):
                rig.step(sync=False)
                assert not any(w.allocated for group in rig.engine.groups for w in group.weights)
                assert not any(group.bucket.allocated for group in rig.engine.groups)
                assert all(group.grad.allocated for group in rig.engine.groups)
            rig.zero()
            assert not any(group.grad.allocated for group in rig.engine.groups)


@pytest.mark.parametrize("budget_units", [0, 1, 2, 3])
def test_prefetch_budget_is_in_bytes(budget_units):
    """Weights are gathered ahead until the budget is used up: one unit more than fits in it
    entirely, and at least one."""
    with pretended_world(1):
        layer = weight_bytes(build(Setup(ZERO_3, layers=6)))["layers.0"]
    setup = Setup(ZERO_3, layers=6, tied=True, world=2)
    with pretended_world(2):
        layer = weight_bytes(build(setup))["layers.0"]
    rig = steady(setup.but(prefetch_bytes=layer * budget_units), steps=2)
    ahead = max(budget_units, 1)
    assert max(len(units) for units in alive(rig.runtime, "weight")) == 2 + ahead
