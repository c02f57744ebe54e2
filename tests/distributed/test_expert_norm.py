"""The gradient norm counts each expert's parameters once where experts and dense layers have
different tensor-parallel sizes. Core of 0.16.1 looks at the dense rank for both and leaves out
biases of experts; so the reference is the sum over the gradients themselves."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch.distributed as dist

from tests.distributed.launch import run_ranks
from tests.distributed.topologies import (
    Topology,
    build_topology_trainer,
    case_for,
    coordinates,
    init_topology,
    run_schedule,
)

TOPOLOGIES = (
    Topology("tp2-ep2-etp1", tp=2, ep=2, etp=1, sp=True, experts=4),
    # From 0.18 on core gives the optimizer of 'no_shard' the model-parallel ranks: here one.
    Topology("ep2", ep=2, experts=4),
)


def _norm_and_reference(topology: Topology, strategy: str) -> tuple[float, float]:
    case = case_for(topology, bias=True, clip=1e9)
    trainer = build_topology_trainer(topology, case, strategy)
    run_schedule(trainer, 0)
    mine: dict[Any, float] = {}
    gradients = trainer.gradients()
    for name, pair in trainer._pairs():
        place = coordinates(pair.unsharded, name, 0)
        mine[place] = float(gradients[name].double().square().sum())
    pieces: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(pieces, mine)
    biases = [place for place in mine if "experts" in place[0] and "fc2.bias" in place[0]]
    assert biases, "what core leaves out is not in this model"
    whole = {place: value for piece in pieces for place, value in piece.items()}
    success, norm, _ = trainer.optimizer.step()
    assert success
    return float(norm), math.sqrt(sum(whole.values()))


def _compare(rank: int, world: int, topology: Topology) -> list[tuple[str, float, float]]:
    init_topology(topology)
    strategies = ("no_shard", "optim_grads_params")
    return [(name, *_norm_and_reference(topology, name)) for name in strategies]


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=lambda topology: topology.name)
def test_biases_of_experts_are_in_the_norm(topology: Topology) -> None:
    for found in run_ranks(_compare, 2, topology):
        for strategy, norm, reference in found:
            assert norm == pytest.approx(reference, rel=1e-5), strategy
