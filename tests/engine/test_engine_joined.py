"""Units of several layers each."""

from __future__ import annotations

import pytest
import torch

from megatron_fsdp_adapter.core.engine.partition import ROOT, join_units, partition, unit_modules
from megatron_fsdp_adapter.core.runtime.device import HostRuntime
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
    names = [[plan.name for plan in join_units(plans, numel)] for numel in (0, 4, 5, 12, 1000)]
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
    assert [plan.name for plan in join_units(plans, 100)] == ["0.0", "0.1", "1 to 2", ROOT]
