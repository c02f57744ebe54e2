"""The slot of a unit, the units that may hold it, and that no memory comes or goes in it."""

from __future__ import annotations

from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_fsdp_adapter.core.engine import hooks
from megatron_fsdp_adapter.core.engine.buffer import plan_slots
from megatron_fsdp_adapter.core.topology import DENSE
from tests.lib.engine.engine_cases import buffers_of, built
from tests.lib.engine.pretended import PretendCommunicator
from tests.lib.engine.scenarios import EVENTS, ZERO_1, ZERO_3
from tests.lib.engine.small_model import Layer, Setup

CHECKS = ("core/engine/buffer.py", "core/engine/construction.py", "core/engine/gather.py")

GPT = ["Embedding", *["Layer"] * 4, "Linear", "NoneType"]
NESTED = [*["Layer", *["Expert"] * 3] * 3, "NoneType"]
Row = tuple[list[str], list[int | None], dict[str, Any], dict[int, int], tuple[int, ...]]
SLOTS: dict[str, Row] = {}
"""Kinds of units, their bytes, options, and which slots they get, of how many bytes."""
SLOTS["layers alternate between two slots and the ends share one"] = (
    GPT,
    [90, 5, 6, 7, 8, 100, 3],
    {},
    {0: 2, 1: 0, 2: 1, 3: 0, 4: 1, 5: 2, 6: 3},
    (8, 8, 100, 3),
)
SLOTS["units that are no layers have slots of their own"] = (
    ["A", "B", "NoneType"],
    [1, 2, 0],
    {},
    {0: 0, 1: 1, 2: 2},
    (1, 2, 0),
)
SLOTS["two of a kind are no layers"] = (
    ["Layer", "Layer", "NoneType"],
    [4, 5, 0],
    {},
    {0: 0, 1: 1, 2: 2},
    (4, 5, 0),
)
SLOTS["another unit between layers"] = (
    ["E", "L", "L", "M", "L", "H", "NoneType"],
    [1] * 7,
    {},
    {0: 2, 1: 0, 2: 1, 3: 3, 4: 0, 5: 4, 6: 5},
    (1,) * 6,
)
SLOTS["no unit computes in the slot of one that it is inside of"] = (
    NESTED,
    [*[9, 1, 2, 3] * 3, 5],
    {"depths": [*[0, 1, 1, 1] * 3, 0]},
    dict(enumerate((0, 2, 3, 2, 1, 3, 2, 3, 0, 2, 3, 2, 4))),
    (9, 9, 3, 3, 5),
)
SLOTS["units that keep take no slot, and those that are left take turns"] = (
    ["Embedding", *["Layer"] * 4, "Head", "NoneType"],
    [90, None, 6, 7, 8, None, 3],
    {},
    {0: 2, 2: 0, 3: 1, 4: 0, 6: 3},
    (8, 8, 90, 3),
)
SLOTS["where all units keep there is no memory"] = (GPT, [None] * 7, {}, {}, (0,))


@pytest.mark.parametrize("name", SLOTS)
def test_slots_of_units(name):
    kinds, sizes, options, slots, nbytes = SLOTS[name]
    slot_of, found = plan_slots(kinds, sizes, **options)
    assert {unit: slot_of[unit] for unit in slots} == slots
    assert tuple(found) == nbytes


UNIT = st.tuples(st.sampled_from("ABCDE"), st.integers(0, 99))


@given(st.lists(UNIT, max_size=12), st.integers(0, 99))
def test_every_unit_fits_and_neighbors_do_not_share(units, root):
    kinds = [kind for kind, _ in units]
    sizes = [size for _, size in units]
    sizes.append(root)
    slot_of, nbytes = plan_slots([*kinds, "root"], sizes)
    for size, slot in zip(sizes, slot_of, strict=True):
        assert size <= nbytes[slot]
    assert slot_of[-1] not in slot_of[:-1], "the root is there while any other is"
    repeated = [at for at, kind in enumerate(kinds) if kinds.count(kind) >= 3]
    for one, other in pairwise(repeated):
        assert slot_of[one] != slot_of[other]
    assert sum(nbytes) <= sum(sizes) + max(sizes), "no more than dynamic memory could need"


def test_a_backward_whose_beginning_is_not_seen_is_an_error(monkeypatch):
    """Its slot may hold the weights of another unit."""
    with built(Setup(slots=True)) as rig:
        rig.step()
        monkeypatch.setattr(hooks, "on_outputs_needed", lambda *_: None)
        with pytest.raises(RuntimeError, match=r"unit layers\.\d: its backward ran without"):
            rig.loss().backward()


def test_a_unit_inside_another_of_its_slot_is_an_error():
    """Layer 2 is called by layer 0, which computes meanwhile."""
    with built(Setup(slots=True, root_norm=False)) as rig:
        inner = rig.model.layers[2]
        outer = rig.model.layers[0]
        plain = Layer._inner
        outer._inner = lambda x: inner(plain(outer, x))
        with pytest.raises(RuntimeError, match="layers.2 is called inside unit layers.0"):
            rig.loss()


def test_buffers_of_slots_keep_their_memory():
    with built(Setup(slots=True)) as rig:
        kinds = (".weight", ".bucket")
        buffers = [flat for name, flat in buffers_of(rig.engine) if name.endswith(kinds)]
        places = [flat.data_ptr() for flat in buffers]
        rig.step(microbatches=2)
        rig.evaluate()
        assert [flat.data_ptr() for flat in buffers] == places
        assert all(places)
        storages = {flat.untyped_storage().data_ptr() for flat in buffers}
        assert len(storages) == 8, "two of layers, one of the ends, the root's; weights and buckets"


def test_kept_gradients_are_not_received_in_memory_of_slots():
    """Late ones, which are kept in no slot either, among them. NCCL hangs where one end of an
    exchange is registered and the other one is not."""
    setup = Setup(ZERO_3, own=(ZERO_1, ZERO_3), slots=True, exchange=True)
    plain = PretendCommunicator.all_to_all
    watched = mock.patch.object(PretendCommunicator, "all_to_all", autospec=True, side_effect=plain)
    with built(setup) as rig, watched as exchanged:
        memory = [grads.slot.memory for grads in rig.engine.grads]
        slots = {one.data_ptr() for one in memory if one is not None}
        slots.add(rig.engine.reduce.domains[DENSE].received.tensor.data_ptr())
        rig.step(microbatches=2)
        EVENTS["gradients_late"](rig)
    in_slots = set()
    for call in exchanged.call_args_list:
        places = [one.untyped_storage().data_ptr() for one in call.args[1:]]
        in_slots.add(tuple(place in slots for place in places))
    assert in_slots == {(True, True), (False, False)}
