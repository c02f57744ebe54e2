"""Which unit is gathered ahead: the recorded order, alone and on a model."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_fsdp_adapter.core.engine.prefetch import BACKWARD, FORWARD, LOOKAHEAD, PrefetchOrder
from tests.engine.engine_cases import Rig, Setup, build
from tests.engine.pretended import pretended_world
from tests.engine.recording import MARK
from tests.engine.scenarios import ZERO_3

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
        FORWARD: lambda: order.begin(FORWARD), BACKWARD: lambda: order.begin(BACKWARD),
        "first": order.first, "last": lambda: [i for i in range(made[0]) if order.is_last(i)],
    }  # fmt: skip
    for step in steps:
        asked, expected = step if isinstance(step, tuple) else (step, None)
        found = ask[asked]() if asked in ask else order.request(asked)
        assert expected is None or list(found) == expected


def test_asking_again_changes_nothing():
    order = PrefetchOrder(3)
    order.begin(FORWARD)
    assert [list(order.request(0)) for _ in range(2)] == [[1], [1]]
    order.begin(FORWARD)
    assert list(order.first()) == [0]


# On a model.


def launched(action: str, *paths: list[int]) -> list[list[str]]:
    """Gathers, and forwards of layers, of an evaluation or step along each path, of one model."""
    found = []
    with pretended_world(2):
        rig = build(Setup(ZERO_3))
        with rig.watch():
            for rig.model.path in paths:
                rig.runtime.log.clear()
                getattr(rig, action)()
                marks = [entry.what for entry in rig.runtime.log if entry.action == MARK]
                found.append([what for what in marks if what.startswith(("all_gather", "forward"))])
    return found


def test_the_first_pass_already_gathers_ahead():
    [first] = launched("evaluate", [0, 1, 2, 3])
    assert first == [
        *(f"all_gather {unit}" for unit in ("root", "embedding", "layers.0", "layers.1")),
        "forward layers.0", "all_gather layers.2", "forward layers.1", "all_gather layers.3",
        "forward layers.2", "all_gather head", "forward layers.3",
    ]  # fmt: skip


def test_a_model_in_another_order_than_listed_is_learned_in_one_pass():
    """In the second pass each forward is preceded by the gather of the layer after it only."""
    _, second = launched("evaluate", [3, 1, 0, 2], [3, 1, 0, 2])
    assert second[-7:] == [
        "forward layers.3", "all_gather layers.0", "forward layers.1", "all_gather layers.2",
        "forward layers.0", "all_gather head", "forward layers.2",
    ]  # fmt: skip


@pytest.mark.parametrize(("action", "passes"), [("evaluate", 1), ("step", 2)])
def test_a_skipped_layer_costs_one_gather_for_nothing(action, passes):
    """The next pass knows better."""
    found = launched(action, [0, 1, 2, 3], [0, 1, 2, 3], [0, 2, 3], [0, 2, 3])
    assert [one.count("all_gather layers.1") for one in found][1:] == [passes, passes, 0]


def begun() -> Rig:
    """Inside a pretended world: behind a step, in a microbatch that is not the last."""
    rig = build(Setup(ZERO_3))
    rig.step()
    rig.zero()
    rig.last(False)
    return rig


def gathered(rig: Rig) -> bool:
    return any(name.endswith(".weight") for name in rig.allocated())


def test_with_a_forward_in_flight_its_backward_comes_next():
    """As in a pipeline: nothing is gathered for a forward that may not come."""
    with pretended_world(2):
        rig = begun()
        one, other = rig.loss(0), rig.loss(1)
        rig.runtime.log.clear()
        one.backward()
        rig.last(True)
        other.backward()
        assert not any(entry.what == "all_gather embedding" for entry in rig.runtime.log)
        assert not gathered(rig)


def test_what_was_gathered_for_a_forward_that_did_not_come_is_outdated():
    """A caller that ends the step after a microbatch that was not said to be the last."""
    with pretended_world(2):
        rig = begun()
        rig.loss(0).backward()
        assert gathered(rig)
        rig.finish()
        rig.optimizer_step()
        assert not gathered(rig)
