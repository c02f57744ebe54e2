"""The order in which a unit's reductions are launched, and who scales what they add up."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatron_fsdp_adapter.config import STRATEGIES
from megatron_fsdp_adapter.engine.reduce import largest_domain_first
from tests.engine.engine_cases import (
    PretendCommunicator,
    ScalingCommunicator,
    Setup,
    build,
    pretended_world,
)
from tests.engine.engine_scenarios import microbatches


def test_the_largest_domain_of_a_unit_is_reduced_first():
    """Equal sizes in the order of the parameters; the same on every rank."""

    def group(domain, numel):
        return SimpleNamespace(
            key=SimpleNamespace(domain=domain), layout=SimpleNamespace(total_numel=numel)
        )

    small, large, rest = group("one", 8), group("two", 9), group("one", 2)
    found = largest_domain_first([small, large, rest])
    assert found == [("one", [small, rest]), ("two", [large])]
    assert [name for name, _ in largest_domain_first([small, large])] == ["two", "one"]
    assert [name for name, _ in largest_domain_first([small, group("two", 8)])] == ["one", "two"]


@pytest.mark.parametrize("comm_dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads", "optim_grads_params"])
def test_a_scale_that_the_collective_applies_is_not_applied_again(strategy, comm_dtype):
    """Four ranks: the mean is exact in binary, whoever scales."""
    if comm_dtype is not None and not STRATEGIES[strategy].shard_grads:
        return
    setup = Setup(strategy, world=4, rank=1, dtype=torch.float32, comm_dtype=comm_dtype)
    found = []
    for kind in (PretendCommunicator, ScalingCommunicator):
        with pretended_world(4, 1):
            rig = build(setup, None, kind)
            microbatches(rig)
            found.append(rig.weights())
    plain, scaled = found
    for name, value in plain.items():
        assert torch.equal(scaled[name], value), name
