"""Which unit is gathered ahead: the recorded order, alone and on a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from megatron_fsdp_adapter.core.engine.launches import GATHERED
from megatron_fsdp_adapter.core.engine.prefetch_order import (
    BACKWARD,
    FORWARD,
    LOOKAHEAD,
    PrefetchOrder,
)
from tests.lib.engine.engine_cases import build
from tests.lib.engine.pretended import pretended_world
from tests.lib.engine.scenarios import TWO_DOMAINS, ZERO_1, ZERO_3
from tests.lib.engine.small_model import Setup

CHECKS = ("core/engine/gather.py", "core/engine/prefetch_order.py")

FAR = LOOKAHEAD + 5
Steps = Callable[["Asked"], None]
ORDERS: dict[str, tuple[tuple[Any, ...], Steps]] = {}
"""Arguments of an order, and passes that begin, and requests with what is expected after them."""


def order(name: str, *made: Any) -> Callable[[Steps], Steps]:
    """Decorator: a row of `ORDERS`."""

    def add(steps: Steps) -> Steps:
        ORDERS[name] = (made, steps)
        return steps

    return add


class Asked:
    """An order that is compared with what is expected of it."""

    def __init__(self, units: int, *more: Any) -> None:
        self.units = range(units)
        self.order = PrefetchOrder(units, *more)
        self.begin = self.order.begin

    def request(self, unit: int, expected: list[int] | None = None) -> None:
        found = self.order.request(unit)
        assert expected is None or list(found) == expected

    def first(self, expected: list[int]) -> None:
        assert list(self.order.first()) == expected

    def last(self, expected: list[int]) -> None:
        assert [unit for unit in self.units if self.order.is_last(unit)] == expected


# The root unit, which has the last ordinal, comes first in both directions.
@order("module order stands in for the first passes", 4)
def _first_passes(asked):
    asked.first([3, 0])
    asked.begin(FORWARD)
    asked.request(3, [0, 1, 2])
    asked.request(0, [1, 2])
    asked.begin(BACKWARD)
    asked.request(3, [2, 1, 0])


@order("units that need no weights in backward are not expected there", 4, [0, 2])
def _not_in_backward(asked):
    asked.begin(FORWARD)
    asked.request(3, [0, 1, 2])
    asked.begin(BACKWARD)
    asked.request(3, [1])


@order("a pass is replayed in the next of its direction", 4)
def _replayed(asked):
    asked.begin(FORWARD)
    asked.request(3)
    asked.request(2)
    asked.request(0)
    asked.begin(BACKWARD)
    asked.request(0)
    asked.request(1)
    asked.request(3)
    asked.begin(FORWARD)
    asked.request(3, [2, 0])
    asked.first([3, 2])
    asked.last([0])
    asked.begin(BACKWARD)
    asked.request(0, [1, 3])


@order("an empty pass leaves the order as it was", 3)
def _empty_pass(asked):
    asked.begin(FORWARD)
    asked.request(2)
    asked.begin(BACKWARD)
    asked.begin(FORWARD)
    asked.begin(FORWARD)
    asked.first([2])


@order("a request that skips ahead is followed", 6)
def _skips_ahead(asked):
    asked.begin(FORWARD)
    asked.request(0, [1, 2, 3, 4])
    asked.request(3, [4])


@order("one that does not fit expects nothing until one fits again", 6)
def _does_not_fit(asked):
    asked.begin(FORWARD)
    asked.request(2, [3, 4])
    asked.request(1, [])
    asked.request(3, [4])


@order("a jump as far as the lookahead fits", FAR)
def _far_jump(asked):
    asked.begin(FORWARD)
    asked.request(LOOKAHEAD - 2, list(range(LOOKAHEAD - 1, FAR - 1)))


@order("a jump beyond it does not", FAR)
def _too_far_jump(asked):
    asked.begin(FORWARD)
    asked.request(LOOKAHEAD - 1, [])


@order("asking again changes nothing", 3)
def _asked_again(asked):
    asked.begin(FORWARD)
    asked.request(0, [1])
    asked.request(0, [1])
    asked.begin(FORWARD)
    asked.first([0])


@order("a unit used twice is expected twice", 3)
def _used_twice(asked):
    asked.begin(FORWARD)
    asked.request(0)
    asked.request(1)
    asked.request(0)
    asked.request(2)
    asked.begin(FORWARD)
    asked.request(0, [1, 0, 2])
    asked.request(1, [0, 2])
    asked.request(0, [2])


@pytest.mark.parametrize("name", ORDERS)
def test_what_is_expected_after_a_request(name):
    made, steps = ORDERS[name]
    steps(Asked(*made))


# On a model.


def test_with_a_forward_in_flight_its_backward_comes_next(two_ranks):
    """As in a pipeline: nothing is gathered for a forward that may not come."""
    rig = build(Setup(ZERO_3))
    rig.step()
    rig.zero()
    rig.last(False)
    one = rig.loss(0)
    other = rig.loss(1)
    rig.runtime.log.clear()
    one.backward()
    rig.last(True)
    other.backward()
    assert not any(entry.what == "all_gather embedding" for entry in rig.runtime.log)
    assert not any(name.endswith(".weight") for name in rig.allocated())


def test_weights_that_stay_are_gathered_once_a_step_in_a_unit_with_others_that_do_not():
    setup = Setup(ZERO_3, split_strategy=ZERO_1, **TWO_DOMAINS)
    launched: Counter[str] = Counter()
    with pretended_world(setup.world, setup.rank):
        rig = build(setup)
        log = rig.engine.gather.log
        note = log.note

        def counted(kind: str, groups: Any, communicator: Any) -> None:
            if kind == GATHERED:
                launched.update(group.name for group in groups)
            note(kind, groups, communicator)

        log.note = counted
        with rig.watch():
            rig.step(microbatches=2)
            launched.clear()
            rig.step(microbatches=2)
    for layer in range(setup.layers):
        assert launched[f"layers.{layer}/expert"] == 1
        assert launched[f"layers.{layer}/dense"] > 1
