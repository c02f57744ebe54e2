"""Experts that are cut over fewer tensor-parallel ranks than dense layers, with one expert-parallel
rank: like stock DDP where core marks their weights as experts' (0.19 on), and refused where it
marks them as dense ones, which is wrong under any wrapper."""

from __future__ import annotations

import pytest

from tests.distributed.checks import check_step
from tests.distributed.gpt import STRATEGIES
from tests.distributed.launch import run_ranks
from tests.distributed.topologies import (
    Topology,
    build_chunk,
    build_topology_trainer,
    case_for,
    init_topology,
    model_config,
    topology_step,
)

TOPOLOGY = Topology("tp2-etp1", tp=2, etp=1, sp=True, experts=4)


def _core_marks_experts() -> bool:
    case = case_for(TOPOLOGY)
    chunk = build_chunk(TOPOLOGY, case, model_config(TOPOLOGY, case), 0)
    marks = {p.allreduce for n, p in chunk.named_parameters() if ".experts." in n}  # type: ignore[attr-defined]
    assert len(marks) == 1
    return marks == {False}


def _trains(rank: int, world: int) -> bool:
    init_topology(TOPOLOGY)
    case = case_for(TOPOLOGY)
    if not _core_marks_experts():
        with pytest.raises(ValueError, match="expert_tensor_parallel_size=1 with tensor_model_par"):
            build_topology_trainer(TOPOLOGY, case, "optim")
        return False
    reference = build_topology_trainer(TOPOLOGY, case, None)
    ours = {s: build_topology_trainer(TOPOLOGY, case, s) for s in STRATEGIES}
    for step in range(3):
        weights = reference.weights()
        expected = topology_step(reference, step)
        for strategy, trainer in ours.items():
            trainer.load(weights)
            check_step(topology_step(trainer, step), expected, f"{strategy}, step {step}")
    return True


@pytest.mark.parametrize("world", (2, 4))
def test_trains_like_stock_ddp_or_is_refused(world: int) -> None:
    found = run_ranks(_trains, world)
    assert len(set(found)) == 1
