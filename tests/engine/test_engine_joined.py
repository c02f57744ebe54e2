"""Units of several layers each."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_fsdp_adapter.core.engine.partition import ROOT, partition, unit_modules
from megatron_fsdp_adapter.core.runtime.device import HostRuntime
from megatron_fsdp_adapter.sharding.unit_grouping import (
    JOINED_NUMEL,
    default_unit_numel,
    group_layers,
    layer_numels,
)
from tests.engine.engine_cases import Setup, build
from tests.engine.engine_scenarios import SCENARIOS, PlainRig
from tests.engine.pretended import LateCommunicator, pretended_world
from tests.engine.recording import MARK

pytestmark = pytest.mark.once

ZERO_3 = "optim_grads_params"
TWO_LAYERS = 150
"""Elements: more than one layer of the rigs has, fewer than two."""

TELLING = ("microbatches", "layers_skipped")


@pytest.mark.parametrize(
    "scenario",
    [pytest.param(s, marks=() if s in TELLING else pytest.mark.full) for s in SCENARIOS],
)
def test_every_access_is_ordered_and_weights_are_those_of_a_plain_model(scenario):
    setup = Setup(ZERO_3, layers=5, joined=TWO_LAYERS)
    variants = (
        setup, setup.but(slots=True, comm_dtype=torch.bfloat16), setup.but(strategy="optim"),
        setup.but(recompute="reentrant"), setup.but(recompute="non_reentrant"),
    )  # fmt: skip
    for one in variants:
        with pretended_world(2):
            rig = build(one)
            assert [unit.name for unit in rig.engine.units[1:4]] == [
                "layers.0 to layers.1", "layers.2 to layers.3", "layers.4",
            ]  # fmt: skip
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


def collectives(joined: int) -> list[str]:
    with pretended_world(2):
        rig = build(Setup(ZERO_3, layers=4, joined=joined))
        with rig.watch():
            rig.step()
            rig.runtime.log.clear()
            rig.step()
        marks = [entry.what for entry in rig.runtime.log if entry.action == MARK]
    return [one for one in marks if "layers" in one and "ward" not in one]


def test_joined_layers_are_gathered_and_reduced_by_one_launch():
    apart, together = collectives(0), collectives(TWO_LAYERS)
    assert len(apart) == 2 * len(together) > 0


def test_layers_are_joined_until_a_unit_has_the_elements():
    model = torch.nn.Sequential(
        torch.nn.Embedding(5, 2), *[torch.nn.Linear(2, 2, bias=False) for _ in range(5)],
        torch.nn.LayerNorm(2), torch.nn.Linear(2, 2, bias=False),
    )  # fmt: skip
    plans = partition(
        model, unit_modules(model, lambda child: True), domain_of=lambda param, fqn: "dense"
    )
    names = [[plan.name for plan in group_layers(plans, numel)] for numel in (0, 4, 5, 12, 1000)]
    apart = ["0", "1", "2", "3", "4", "5", "6", "7", ROOT]
    assert names[:2] == [apart, apart]
    assert names[2] == ["0", "1 to 2", "3 to 4", "5", "6", "7", ROOT]
    assert names[3] == ["0", "1 to 3", "4 to 5", "6", "7", ROOT]
    assert names[4] == ["0", "1 to 5", "6", "7", ROOT]


def test_what_is_inside_another_unit_is_not_joined():
    pair = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model = torch.nn.Sequential(pair, torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    plans = partition(
        model, unit_modules(model, lambda child: isinstance(child, torch.nn.Linear)
                            or child is pair), domain_of=lambda param, fqn: "dense",
    )  # fmt: skip
    assert [plan.name for plan in group_layers(plans, 100)] == ["0.0", "0.1", "1 to 2", ROOT]


def lists(*widths: tuple[int, ...]) -> torch.nn.Module:
    """A list of square layers of each width, for each of the tuples; behind an embedding."""
    model = torch.nn.Module()
    model.embedding, model.output_layer = torch.nn.Embedding(5, 2), torch.nn.Linear(2, 5)
    for number, layers in enumerate(widths):
        of_list = [torch.nn.Linear(width, width, bias=False) for width in layers]
        setattr(model, f"list{number}", torch.nn.ModuleList(of_list))
    return model


def plans_of(model: torch.nn.Module):
    kinds = (torch.nn.Linear, torch.nn.Embedding)
    found = unit_modules(model, lambda child: isinstance(child, kinds))
    return partition(model, found, domain_of=lambda param, fqn: "dense")


def test_layers_of_two_lists_are_not_joined():
    """Of two towers, or the last layer and one that predicts further tokens: other modules run in
    between."""
    names = [plan.name for plan in group_layers(plans_of(lists((2, 2, 2), (2, 2))), 1000)]
    assert names == [
        "embedding", "output_layer", "list0.0 to list0.2", "list1.0 to list1.1", ROOT
    ]  # fmt: skip


def test_layers_are_counted_where_a_list_has_several():
    assert layer_numels(plans_of(lists((2, 3, 4), (5,)))) == [4, 9, 16]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(1, 300_000_000), max_size=80)
    | st.tuples(st.integers(1, 300_000_000), st.integers(1, 200)).map(lambda of: [of[0]] * of[1])
)
def test_what_is_joined_by_default(numels: list[int]):
    numel = default_unit_numel(numels)
    assert 0 <= numel <= JOINED_NUMEL
    units: list[list[int]] = []
    for layer in numels:
        if units and sum(units[-1]) < numel:
            units[-1].append(layer)
        else:
            units.append([layer])
    if numel == 0:
        assert units == [[layer] for layer in numels]
        alike = len({*numels}) == 1 and len(numels) >= 16
        assert not alike or numels[0] >= JOINED_NUMEL
        return
    assert len(numels) >= 16 and max(numels) < numel
    assert len(units) >= 8
    assert max(map(sum, units)) <= min(2 * JOINED_NUMEL, sum(numels) / 8)
    assert all(sum(unit) >= numel for unit in units[:-1])


@pytest.mark.parametrize(
    ("count", "layer", "by"),
    ((15, 60_000_000, 1), (16, 60_821_504, 2), (24, 12_596_224, 2), (32, 218_112_000, 1),
     (80, 45_000_000, 3), (40, 60_000_000, 2), (17, 99_999_999, 2), (17, 100_000_000, 1)),
)  # fmt: skip
def test_how_many_layers_of_known_models_are_joined(count: int, layer: int, by: int):
    numel = default_unit_numel([layer] * count)
    assert max(1, -(-numel // layer)) == by
