"""Which unit is gathered ahead: the recorded order, alone and on a model."""

from __future__ import annotations

import pytest

from megatron_fsdp_adapter.core.engine.prefetch import BACKWARD, FORWARD, LOOKAHEAD, PrefetchOrder
from tests.engine.engine_cases import Rig, Setup, build
from tests.engine.pretended import pretended_world
from tests.engine.recording import MARK

ZERO_3 = "optim_grads_params"


def expected_after(order: PrefetchOrder, ordinal: int, count: int = 1) -> list[int]:
    return list(order.request(ordinal))[:count]


def test_module_order_stands_in_for_the_first_passes():
    """The root unit, which has the last ordinal, comes first in both directions."""
    order = PrefetchOrder(4)
    assert list(order.first()) == [3, 0]
    order.begin(FORWARD)
    assert list(order.request(3)) == [0, 1, 2]
    assert list(order.request(0)) == [1, 2]
    order.begin(BACKWARD)
    assert list(order.request(3)) == [2, 1, 0]


def test_units_that_need_no_weights_in_backward_are_not_expected_there():
    order = PrefetchOrder(4, forward_only=[0, 2])
    order.begin(FORWARD)
    assert list(order.request(3)) == [0, 1, 2]
    order.begin(BACKWARD)
    assert list(order.request(3)) == [1]


def test_a_pass_is_replayed_in_the_next_of_its_direction():
    order = PrefetchOrder(4)
    for direction, requests in ((FORWARD, [3, 2, 0]), (BACKWARD, [0, 1, 3]), (FORWARD, [3])):
        order.begin(direction)
        for ordinal in requests:
            found = list(order.request(ordinal))
    assert found == [2, 0]
    assert list(order.first()) == [3, 2]
    assert order.is_last(0) and not order.is_last(3)
    order.begin(BACKWARD)
    assert list(order.request(0)) == [1, 3]


def test_an_empty_pass_leaves_the_order_as_it_was():
    order = PrefetchOrder(3)
    order.begin(FORWARD)
    list(order.request(2))
    order.begin(BACKWARD)
    order.begin(FORWARD)
    order.begin(FORWARD)
    assert list(order.first()) == [2]


def test_a_request_that_skips_ahead_is_followed():
    order = PrefetchOrder(6)
    order.begin(FORWARD)
    assert expected_after(order, 0) == [1]
    assert expected_after(order, 3) == [4]


def test_a_request_that_does_not_fit_expects_nothing_until_one_fits_again():
    order = PrefetchOrder(6)
    order.begin(FORWARD)
    assert expected_after(order, 2) == [3]
    assert expected_after(order, 1) == []
    assert expected_after(order, 3) == [4]


@pytest.mark.parametrize(
    ("ordinal", "expected"), [(LOOKAHEAD - 2, [LOOKAHEAD - 1]), (LOOKAHEAD, [])]
)
def test_a_jump_beyond_the_lookahead_does_not_fit(ordinal, expected):
    order = PrefetchOrder(LOOKAHEAD + 5)
    order.begin(FORWARD)
    assert expected_after(order, ordinal) == expected


def test_asking_again_changes_nothing():
    order = PrefetchOrder(3)
    order.begin(FORWARD)
    assert list(order.request(0)) == [1]
    assert list(order.request(0)) == [1]
    order.begin(FORWARD)
    assert list(order.first()) == [0]


def test_a_unit_used_twice_is_expected_twice():
    order = PrefetchOrder(3)
    order.begin(FORWARD)
    for ordinal in (0, 1, 0, 2):
        list(order.request(ordinal))
    order.begin(FORWARD)
    assert list(order.request(0)) == [1, 0, 2]
    assert list(order.request(1)) == [0, 2]
    assert list(order.request(0)) == [2]


def gathers_before_forwards(rig: Rig) -> list[tuple[str, list[str]]]:
    """For each forward of a layer, the gathers launched since the one before."""
    found: list[tuple[str, list[str]]] = []
    launched: list[str] = []
    for entry in rig.runtime.log:
        if entry.action == MARK and entry.what.startswith("all_gather"):
            launched.append(entry.what.split()[1])
        elif entry.action == MARK and entry.what.startswith("forward"):
            found.append((entry.what.split()[1], launched))
            launched = []
    return found


def evaluated(path: list[int], times: int) -> Rig:
    with pretended_world(2):
        rig = build(Setup(ZERO_3))
        rig.model.path = path
        with rig.watch():
            for _ in range(times):
                rig.runtime.log.clear()
                rig.evaluate()
    return rig


def test_a_model_in_another_order_than_listed_is_learned_in_one_pass():
    """In the second pass each forward is preceded by the gather of the layer after it only."""
    path = [3, 1, 0, 2]
    second = gathers_before_forwards(evaluated(path, 2))
    assert [name for name, _ in second] == [f"layers.{i}" for i in path]
    follow = [f"layers.{i}" for i in path[1:]] + ["head"]
    assert [launched[-1:] for _, launched in second] == [[name] for name in follow]
    assert [len(launched) for _, launched in second[1:]] == [1, 1, 1]


def test_the_first_pass_already_gathers_ahead():
    launched = gathers_before_forwards(evaluated([0, 1, 2, 3], 1))
    assert launched[0] == ("layers.0", ["root", "embedding", "layers.0", "layers.1"])
    assert launched[1:] == [(f"layers.{i}", [f"layers.{i + 1}"]) for i in (1, 2)] + [
        ("layers.3", ["head"])
    ]


@pytest.mark.parametrize("step", ["evaluate", "step"])
def test_a_skipped_layer_costs_one_gather_for_nothing(step):
    """The next pass knows better."""
    with pretended_world(2):
        rig = build(Setup(ZERO_3))
        counts = []
        with rig.watch():
            for path in ([0, 1, 2, 3], [0, 1, 2, 3], [0, 2, 3], [0, 2, 3]):
                rig.model.path = path
                rig.runtime.log.clear()
                getattr(rig, step)()
                log = [e.what for e in rig.runtime.log if e.action == MARK]
                counts.append(log.count("all_gather layers.1"))
    passes = 2 if step == "step" else 1
    assert counts == [counts[0], passes, passes, 0]


def test_the_last_unit_of_a_forward_is_not_resharded_before_its_backward():
    with pretended_world(2):
        rig = build(Setup(ZERO_3))
        with rig.watch():
            rig.step()
            rig.zero()
            loss = rig.loss()
            head = rig.engine.units[-2]
            assert head.name == "head" and all(w.allocated for g in head.groups for w in g.weights)
            loss.backward()
            assert not any(w.allocated for g in head.groups for w in g.weights)


def marks(rig: Rig) -> list[str]:
    return [entry.what for entry in rig.runtime.log if entry.action == MARK]


def test_the_backward_of_the_first_layers_hides_the_next_microbatchs_first_gather():
    """The embedding's is launched before the first layer's gradients are reduced; with the last
    microbatch none is: the optimizer comes next."""
    with pretended_world(2):
        rig = build(Setup(ZERO_3))
        with rig.watch():
            rig.step()
            rig.zero()
            rig.runtime.log.clear()
            rig.forward_backward(2)
            found = marks(rig)
    gathers = [i for i, what in enumerate(found) if what == "all_gather embedding"]
    reduced = [i for i, what in enumerate(found) if what == "reduce_scatter layers.0"]
    forwards = [i for i, what in enumerate(found) if what == "forward layers.0"]
    assert len(gathers) == 1, "the first was launched with the step"
    assert gathers[0] < reduced[0] < forwards[1]


def test_with_a_forward_in_flight_its_backward_comes_next():
    """As in a pipeline: nothing is gathered for a forward that may not come."""
    with pretended_world(2):
        rig = build(Setup(ZERO_3))
        with rig.watch():
            rig.step()
            rig.zero()
            rig.last(False)
            one, other = rig.loss(0), rig.loss(1)
            rig.runtime.log.clear()
            one.backward()
            rig.last(True)
            other.backward()
            assert "all_gather embedding" not in marks(rig)
            assert not any(w.allocated for group in rig.engine.groups for w in group.weights)


def test_what_was_gathered_for_a_forward_that_did_not_come_is_outdated():
    """A caller that ends the step after a microbatch that was not said to be the last."""
    with pretended_world(2):
        rig = build(Setup(ZERO_3))
        rig.step()
        rig.zero()
        rig.last(False)
        rig.loss(0).backward()
        rig.finish()
        rig.optimizer_step()
        assert not any(w.allocated for group in rig.engine.groups for w in group.weights)
        assert all(unit.outdated for unit in rig.engine.units)
