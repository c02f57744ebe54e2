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

TOPOLOGY = Topology("tp2-ep2-etp1", tp=2, ep=2, etp=1, sp=True, experts=4)


def _norm_and_reference(strategy: str) -> tuple[float, float]:
    case = case_for(TOPOLOGY, bias=True, clip=1e9)
    trainer = build_topology_trainer(TOPOLOGY, case, strategy)
    run_schedule(trainer, 0)
    mine: dict[Any, float] = {}
    gradients = trainer.gradients()
    for name, pair in trainer._pairs():
        place = coordinates(pair.raw, name, 0)
        mine[place] = float(gradients[name].double().square().sum())
    pieces: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(pieces, mine)
    biases = [place for place in mine if "experts" in place[0] and "fc2.bias" in place[0]]
    assert biases, "what core leaves out is not in this model"
    whole = {place: value for piece in pieces for place, value in piece.items()}
    success, norm, _ = trainer.optimizer.step()
    assert success
    return float(norm), math.sqrt(sum(whole.values()))


def _compare(rank: int, world: int) -> list[tuple[str, float, float]]:
    init_topology(TOPOLOGY)
    return [(name, *_norm_and_reference(name)) for name in ("no_shard", "optim_grads_params")]


def test_biases_of_experts_are_in_the_norm() -> None:
    for found in run_ranks(_compare, 2):
        for strategy, norm, reference in found:
            assert norm == pytest.approx(reference, rel=1e-5), strategy
