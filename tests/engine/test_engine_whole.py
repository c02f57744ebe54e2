"""Domains of one rank: nothing of them is sharded, so nothing is gathered, cast for a gather, put
in a bucket or reduced."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron_fsdp_adapter.core.engine import group as groups
from megatron_fsdp_adapter.core.runtime.device import HostRuntime
from megatron_fsdp_adapter.core.topology import DENSE, EXPERT
from tests.engine.engine_cases import Rig, Setup, build
from tests.engine.engine_scenarios import SCENARIOS
from tests.engine.pretended import PretendCommunicator, pretended_world
from tests.engine.recording import MARK, RaceError
from tests.engine.test_engine_races import Deaf
from tests.engine.test_engine_values import assert_same_weights

pytestmark = pytest.mark.once

ZERO_2, ZERO_3 = "optim_grads", "optim_grads_params"
MIXED = Setup(ZERO_3, split=True, whole=True)
"""Two ranks share a layer; one map of each layer has a domain of one rank."""


def of_domain(rig: Rig, name: str) -> list[groups.ParamGroup]:
    return [group for group in rig.engine.groups if group.key.domain == name]


@pytest.mark.parametrize("strategy", [ZERO_2, ZERO_3])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_weights_equal_those_of_a_plain_model(strategy, scenario):
    for split in (False, True):
        setup = Setup(strategy, world=1, dtype=torch.float32, split=split, whole=True)
        assert_same_weights(setup, scenario)


def test_nothing_is_launched_and_no_bucket_is_taken():
    for setup in (MIXED, MIXED.but(slots=True, comm_dtype=torch.bfloat16, fp32_accumulation=True)):
        with pretended_world(2):
            rig = build(setup)
            alone = of_domain(rig, EXPERT)
            assert alone and all(group.bucket is group.grad for group in alone)
            assert not any(plane.full.in_slot for group in alone for plane in group.planes)
            with rig.watch():
                addresses = [group.weights[0].tensor.data_ptr() for group in alone]
                rig.step(microbatches=3)
                held = {group.name: group.grad.nbytes for group in alone}
                assert all(group.grad.allocated and held[group.name] for group in alone)
                rig.zero()
                assert not any(group.grad.allocated for group in alone)
                rig.step(microbatches=3)
                assert addresses == [group.weights[0].tensor.data_ptr() for group in alone]
            launched = [entry.what for entry in rig.runtime.log if entry.action == MARK]
        assert any("all_gather" in what for what in launched)
        assert any("reduce_scatter" in what for what in launched)
        assert not any("#" in what for what in launched), "the second group of each layer"


def weights_after(setup: Setup, scenario: str) -> dict[str, torch.Tensor]:
    with pretended_world(setup.world):
        rig = build(setup, HostRuntime(), PretendCommunicator)
        SCENARIOS[scenario](rig)
        return rig.weights()


def test_the_bits_are_those_of_shards_and_buckets_where_the_scale_is_a_power_of_two():
    for changes in ({}, {"scale_before_sum": True}, {"strategy": ZERO_2}, {"slots": True}):
        for scenario in ("microbatches", "evaluation_between", "gradients_late", "layer_twice"):
            setup = MIXED.but(**changes)
            found, expected = (
                weights_after(one, scenario) for one in (setup, setup.but(whole=False))
            )
            assert all(torch.equal(found[name], value) for name, value in expected.items())


def after_further_backwards(rig: Rig) -> dict[str, torch.Tensor]:
    """Each is said to be the last, and after the second the gradients are finished."""
    for _ in range(2):
        rig.zero()
        for index in range(3):
            rig.last(True)
            rig.loss(index).backward()
            if index == 1:
                rig.finish()
        rig.finish()
        rig.optimizer_step()
    return rig.weights()


def test_a_backward_after_the_last_is_added():
    found = []
    for whole in (True, False):
        with pretended_world(2):
            rig = build(MIXED.but(whole=whole), HostRuntime(), PretendCommunicator)
            found.append(after_further_backwards(rig))
    assert all(torch.equal(found[0][name], value) for name, value in found[1].items())


def test_what_takes_a_scale_back_waits_for_the_scaling():
    """Forwards order that too, where there are buckets of before to free."""
    with pretended_world(1):
        rig = build(Setup(ZERO_3, world=1, whole=True), deaf := Deaf(("_take_back",)))
        reduce = rig.engine.reduce
        reduce.plans = {DENSE: replace(reduce.plans[DENSE], scale=0.5)}
        with pytest.raises(RaceError, match="without waiting for"), rig.watch():
            after_further_backwards(rig)
    assert deaf.missed


def test_main_weights_of_the_compute_dtype_are_the_compute_weights():
    with pretended_world(2):
        rig = build(MIXED.but(main_params=None))
        assert all(group.main is group.weights[0] for group in of_domain(rig, EXPERT))
        assert not any(group.main is group.weights[0] for group in of_domain(rig, DENSE))


def test_a_domain_of_several_ranks_cannot_be_whole():
    with pretended_world(2):
        one = build(Setup()).engine.groups[0]
        config = replace(one.config, whole=(DENSE,))
        with pytest.raises(ValueError, match="'dense' is sharded over 2 ranks"):
            groups.ParamGroup("x", one.key, one.managed, one.domain, config, one.staging)
