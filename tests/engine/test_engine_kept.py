"""Units that keep weights, or gradients too, over the microbatches of a step, in a model that
shards both."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from megatron_fsdp_adapter.core.engine.buffer_pool import plan_pool
from megatron_fsdp_adapter.core.runtime.device import HostRuntime
from tests.engine.engine_cases import Rig, Setup, build
from tests.engine.engine_scenarios import KEPT, SCENARIOS, PlainRig
from tests.engine.pretended import LateCommunicator, PretendCommunicator, pretended_world
from tests.engine.recording import MARK

pytestmark = pytest.mark.once

ZERO_1, ZERO_2, ZERO_3 = "optim", "optim_grads", "optim_grads_params"
SLOTS = {"slots": True, "comm_dtype": torch.bfloat16}


TELLING = ("microbatches", "layer_twice", "gradients_late")


@pytest.mark.parametrize(
    "scenario",
    [pytest.param(s, marks=() if s in TELLING else pytest.mark.full) for s in SCENARIOS],
)
def test_every_access_is_ordered_and_weights_are_those_of_a_plain_model(scenario):
    setup = Setup(ZERO_3, own=KEPT)
    for one in (setup, setup.but(**SLOTS)):
        with pretended_world(2):
            rig = build(one)
            with rig.watch():
                SCENARIOS[scenario](rig)
    alone = setup.but(world=1, dtype=torch.float32)
    plain = PlainRig(alone)
    SCENARIOS[scenario](plain)
    with pretended_world(1):
        rig = build(alone, HostRuntime(), LateCommunicator)
        SCENARIOS[scenario](rig)
        found = rig.weights()
    for name, expected in plain.weights().items():
        assert torch.equal(found[name], expected), name


def launches_of_a_step(own: tuple[str, ...], microbatches: int = 3) -> Counter[str]:
    """Of the second step, by kind and unit."""
    with pretended_world(2):
        rig = build(Setup(ZERO_3, own=own))
        with rig.watch():
            rig.step(microbatches)
            rig.runtime.log.clear()
            rig.zero()
            rig.sync(wait=False)
            rig.forward_backward(microbatches)
            rig.finish()
        marks = [entry.what for entry in rig.runtime.log if entry.action == MARK]
    return Counter(mark for mark in marks if mark.startswith(("all_gather", "reduce_scatter")))


def test_kept_weights_are_gathered_and_kept_gradients_reduced_once_a_step():
    """Units: embedding, layers 0 to 3, head, root."""
    found = launches_of_a_step((ZERO_3, ZERO_2, ZERO_1, ZERO_3, ZERO_3, ZERO_3, ZERO_3))
    assert found["all_gather layers.0"] == 1 and found["reduce_scatter layers.0"] == 3
    assert found["all_gather layers.1"] == 1 and found["reduce_scatter layers.1"] == 1
    assert found["all_gather layers.2"] == 6 and found["reduce_scatter layers.2"] == 3


def after_steps(own: tuple[str, ...], told: bool = True, **options) -> dict[str, torch.Tensor]:
    with pretended_world(3, 1):
        setup = Setup(ZERO_3, world=3, rank=1, dtype=torch.bfloat16, own=own, **options)
        rig: Rig = build(setup, HostRuntime(), PretendCommunicator)
        if not told:
            rig.last = lambda is_last: None  # type: ignore[method-assign]
        for _ in range(3):
            rig.step(microbatches=3)
            rig.evaluate()
        return rig.weights()


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert all(torch.equal(value, other[name]) for name, value in one.items())


def test_kept_weights_change_no_bit():
    sharded = after_steps(())
    assert_equal(sharded, after_steps((ZERO_2, ZERO_3)))
    assert_equal(sharded, after_steps((ZERO_2,), slots=True))


def test_kept_gradients_have_the_bits_of_a_strategy_that_keeps_them():
    """Unit by unit. With sharded gradients each microbatch is reduced by itself: another order."""
    kept = after_steps((ZERO_1,))
    assert_equal(kept, after_steps((ZERO_1,), slots=True, exchange=True))
    with pretended_world(3, 1):
        rig = build(
            Setup(ZERO_1, world=3, rank=1, dtype=torch.bfloat16), HostRuntime(),
            PretendCommunicator,
        )
        for _ in range(3):
            rig.step(microbatches=3)
        assert_equal(kept, rig.weights())


def test_gradients_are_kept_for_the_end_where_nobody_says_which_microbatch_is_the_last():
    assert_equal(after_steps(KEPT), after_steps(KEPT, told=False))


def test_units_that_keep_take_no_slot():
    """Those that are left take turns; the first of four layers and the head keep theirs."""
    kinds = ["Embedding", *["Layer"] * 4, "Head", "NoneType"]
    sizes, takes = [90, 5, 6, 7, 8, 100, 3], [True, False, True, True, True, False, True]
    plan = plan_pool(kinds, sizes, takes=takes)
    assert plan.nbytes == (8, 8, 90, 3)
    assert [plan.slot_of[at] for at in (0, 2, 3, 4, 6)] == [2, 0, 1, 0, 3]
    assert plan_pool(kinds, sizes, takes=[False] * 7).nbytes == (0,)


def test_kept_gradients_are_not_received_in_memory_of_slots():
    """Late ones, which are kept in no slot either, among them. NCCL hangs where one end of an
    exchange is registered and the other one is not."""
    seen: set[tuple[bool, bool]] = set()
    slots: set[int] = set()

    class Watched(PretendCommunicator):
        def reduce_scatter_by_exchange(self, pairs, memory=None, *rest):
            for _, source in pairs:
                in_slot = source.untyped_storage().data_ptr() in slots
                seen.add((in_slot, memory is not None))
            return super().reduce_scatter_by_exchange(pairs, memory, *rest)

    with pretended_world(2):
        setup = Setup(ZERO_3, own=(ZERO_1, ZERO_3), slots=True, exchange=True)
        rig = build(setup, HostRuntime(), Watched)
        buckets = [group.staging.buckets for group in rig.engine.groups]
        slots.update(one.data_ptr() for each in buckets if each for one in each.memory)
        rig.step(microbatches=2)
        SCENARIOS["gradients_late"](rig)
    assert seen == {(True, True), (False, False)}
