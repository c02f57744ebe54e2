"""Which slot a unit has, who may hold it, and that nothing comes or goes in it. That training in
slots gives the same weights, and orders every access, is in test_engine_values and _races."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_fsdp_adapter.core.engine import hooks
from megatron_fsdp_adapter.core.engine.buffer_pool import plan_pool
from megatron_fsdp_adapter.core.engine.unit import Phase
from tests.engine.engine_cases import Layer, Setup, build
from tests.engine.pretended import pretended_world

GPT = ["Embedding", "Layer", "Layer", "Layer", "Layer", "Linear", "NoneType"]


def test_layers_alternate_between_two_slots_and_the_ends_share_one():
    plan = plan_pool(GPT, [90, 5, 6, 7, 8, 100, 3])
    assert plan.slot_of == (2, 0, 1, 0, 1, 2, 3)
    assert plan.nbytes == (8, 8, 100, 3)


def test_units_that_are_no_layers_have_slots_of_their_own():
    assert plan_pool(["A", "B", "NoneType"], [1, 2, 0]).slot_of == (0, 1, 2)
    assert plan_pool(["Layer", "Layer", "NoneType"], [4, 5, 0]).slot_of == (0, 1, 2)
    middle = plan_pool(["E", "L", "L", "M", "L", "H", "NoneType"], [1] * 7)
    assert middle.slot_of == (2, 0, 1, 3, 0, 4, 5)


def test_units_inside_layers_take_turns_in_slots_of_their_own():
    """No unit computes in the slot of one that it is inside of."""
    kinds = [*["Layer", *["Expert"] * 3] * 3, "NoneType"]
    depths = [*[0, 1, 1, 1] * 3, 0]
    plan = plan_pool(kinds, [*[9, 1, 2, 3] * 3, 5], depths)
    assert plan.slot_of == (0, 2, 3, 2, 1, 3, 2, 3, 0, 2, 3, 2, 4)
    assert plan.nbytes == (9, 9, 3, 3, 5)


@given(
    st.lists(st.sampled_from("ABCDE"), max_size=12).flatmap(
        lambda kinds: st.tuples(
            st.just([*kinds, "root"]),
            st.lists(st.integers(0, 99), min_size=len(kinds) + 1, max_size=len(kinds) + 1),
        )
    )
)
def test_every_unit_fits_and_neighbors_do_not_share(case):
    kinds, sizes = case
    plan = plan_pool(kinds, sizes)
    assert all(sizes[i] <= plan.nbytes[slot] for i, slot in enumerate(plan.slot_of))
    assert plan.slot_of[-1] not in plan.slot_of[:-1], "the root is there while any other is"
    repeated = [i for i, kind in enumerate(kinds[:-1]) if kinds[:-1].count(kind) >= 3]
    for one, other in pairwise(repeated):
        assert plan.slot_of[one] != plan.slot_of[other]
    assert sum(plan.nbytes) <= sum(sizes) + max(sizes), "no more than dynamic memory could need"


def test_a_backward_whose_beginning_is_not_seen_is_an_error(monkeypatch):
    """Its slot may hold the weights of another unit."""
    with pretended_world(2):
        rig = build(Setup(slots=True))
        rig.step()
        monkeypatch.setattr(hooks, "on_outputs_needed", lambda *_: None)
        rig.zero()
        with pytest.raises(RuntimeError, match=r"unit layers\.\d: its backward ran without"):
            rig.loss().backward()


def test_buffers_of_slots_keep_their_memory():
    with pretended_world(2):
        rig = build(Setup(slots=True))
        buffers = [f for g in rig.engine.groups for f in (*g.weights, g.bucket)]
        places = [buffer.tensor.data_ptr() for buffer in buffers]
        storages = {buffer.tensor.untyped_storage().data_ptr() for buffer in buffers}
        rig.step(microbatches=2)
        rig.evaluate()
        assert all(buffer.allocated for buffer in buffers)
        assert [buffer.tensor.data_ptr() for buffer in buffers] == places
        assert len(storages) == 8, "two of layers, one of the ends, the root's; weights and buckets"


def test_a_unit_kept_for_its_backward_gives_way_and_comes_back():
    """Two forwards in flight: the first keeps the output layer, whose slot the second needs."""
    with pretended_world(2):
        rig = build(Setup(slots=True))
        rig.step()
        rig.zero()
        rig.last(False)
        first = rig.loss(0)
        kept = rig.engine.units[5]
        assert kept.phase is Phase.READY
        second = rig.loss(1)
        first.backward()
        rig.last(True)
        second.backward()
        rig.finish()


def test_a_unit_inside_another_of_its_slot_is_an_error():
    """Layer 2 is called by layer 0, which computes meanwhile."""
    with pretended_world(2):
        rig = build(Setup(slots=True, root_norm=False))
        inner, outer = rig.model.layers[2], rig.model.layers[0]
        plain = Layer._inner
        outer._inner = lambda x: inner(plain(outer, x))
        with pytest.raises(RuntimeError, match="layers.2 is called inside unit layers.0"):
            rig.loss()
