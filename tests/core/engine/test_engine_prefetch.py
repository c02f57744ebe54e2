"""Which unit is gathered ahead: the recorded order, alone and on a model."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_fsdp_adapter.core.engine.gather import BACKWARD, FORWARD, LOOKAHEAD, PrefetchOrder
from tests.lib.engine.engine_cases import build
from tests.lib.engine.scenarios import ZERO_3
from tests.lib.engine.small_model import Setup

CHECKS = ("core/engine/gather.py",)

FAR = LOOKAHEAD + 5
ORDERS: dict[str, tuple[tuple[Any, ...], list[Any]]] = {
    # The root unit, which has the last ordinal, comes first in both directions.
    "module order stands in for the first passes": (
        (4,),
        [("first", [3, 0]), FORWARD, (3, [0, 1, 2]), (0, [1, 2]), BACKWARD, (3, [2, 1, 0])],
    ),
    "units that need no weights in backward are not expected there": (
        (4, [0, 2]),
        [FORWARD, (3, [0, 1, 2]), BACKWARD, (3, [1])],
    ),
    "a pass is replayed in the next of its direction": (
        (4,),
        [FORWARD, 3, 2, 0, BACKWARD, 0, 1, 3, FORWARD, (3, [2, 0]), ("first", [3, 2]),
         ("last", [0]), BACKWARD, (0, [1, 3])],
    ),
    "an empty pass leaves the order as it was": (
        (3,), [FORWARD, 2, BACKWARD, FORWARD, FORWARD, ("first", [2])],
    ),
    "a request that skips ahead is followed": (
        (6,), [FORWARD, (0, [1, 2, 3, 4]), (3, [4])],
    ),
    "one that does not fit expects nothing until one fits again": (
        (6,), [FORWARD, (2, [3, 4]), (1, []), (3, [4])],
    ),
    "a jump as far as the lookahead fits": (
        (FAR,), [FORWARD, (LOOKAHEAD - 2, list(range(LOOKAHEAD - 1, FAR - 1)))],
    ),
    "a jump beyond it does not": ((FAR,), [FORWARD, (LOOKAHEAD - 1, [])]),
    "asking again changes nothing": ((3,), [FORWARD, (0, [1]), (0, [1]), FORWARD, ("first", [0])]),
    "a unit used twice is expected twice": (
        (3,),
        [FORWARD, 0, 1, 0, 2, FORWARD, (0, [1, 0, 2]), (1, [0, 2]), (0, [2])],
    ),
}  # fmt: skip
"""Passes that begin, and requests with what is expected after them."""


@pytest.mark.parametrize("name", ORDERS)
def test_what_is_expected_after_a_request(name):
    made, steps = ORDERS[name]
    order = PrefetchOrder(*made)
    ask = {
        FORWARD: lambda: order.begin(FORWARD),
        BACKWARD: lambda: order.begin(BACKWARD),
        "first": order.first,
        "last": lambda: [i for i in range(made[0]) if order.is_last(i)],
    }
    for step in steps:
        asked, expected = step if isinstance(step, tuple) else (step, None)
        found = ask[asked]() if asked in ask else order.request(asked)
        assert expected is None or list(found) == expected


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
