"""CUDA graphs of layers, noted and replayed on the host, in pipelines and with experts: the numbers
are those of the same wrapper without them, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.autograd.graph import get_gradient_edge

from megatron_fsdp_adapter.graphs.captured import CapturedCall
from tests.distributed.checks import check_same_bits
from tests.distributed.shared_ranks import on_ranks
from tests.distributed.topologies import (
    TOPOLOGIES,
    TopologyTrainer,
    build_topology_trainer,
    case_for,
    init_topology,
    run_schedule,
    topology_step,
)
from tests.engine.fake_graphs import FakeGraphs, put_graphs_into, to_be_graphed

SLOTS = {"fsdp_double_buffer": True}
PARTS = "megatron_fsdp_enable_fine_grained_param_gather"
STEPS = 3


def _numbers(trainer: TopologyTrainer) -> tuple[list[float], Any]:
    found = []
    for step in range(STEPS):
        taken = topology_step(trainer, step)
        for chunk in trainer.chunks:
            chunk.eval()
        found += [taken.loss, taken.norm, run_schedule(trainer, 90 + step, forward_only=True)]
        for chunk in trainer.chunks:
            chunk.train()
    return found, trainer.params()


def _has_accumulator(param: torch.nn.Parameter) -> bool:
    """Whether some graph keeps the node that adds gradients to a weight: what is written to it is
    still there when it is asked for again."""
    get_gradient_edge(param).node.metadata["looked at"] = True
    return "looked at" in get_gradient_edge(param).node.metadata


@contextmanager
def _weights_are_fresh() -> Iterator[list[str]]:
    """Inside, no graph of an earlier step knows a weight that a capture begins to use."""
    captured: list[str] = []

    def record(self: CapturedCall, *args: Any) -> Any:
        params = [group.params[i] for group, indices in self.site.parts for i in indices]
        assert not any(map(_has_accumulator, params)), self.site.name
        captured.append(self.site.name)
        return original(self, *args)

    original = CapturedCall.record
    with mock.patch.object(CapturedCall, "record", record):
        yield captured


def _trains_alike(
    name: str, layers: int, in_flight: int, parts: bool = False, **changes: str
) -> None:
    """`layers` of each chunk have graphs; `in_flight`: pools, of the chunk that has most. parts:
    experts are units of their own."""
    options = {**SLOTS, PARTS: parts}
    topology = replace(TOPOLOGIES[name], **changes)  # type: ignore[arg-type]
    init_topology(topology)
    case = case_for(topology, microbatches=4, num_layers=4)
    plain = build_topology_trainer(topology, case, "optim_grads_params", ddp=options)
    with to_be_graphed():
        trainer = build_topology_trainer(topology, case, "optim_grads_params", ddp=options)
    fakes = [FakeGraphs() for _ in trainer.chunks]
    for chunk, fake in zip(trainer.chunks, fakes, strict=True):
        put_graphs_into(chunk, fake)
    expected, weights = _numbers(plain)
    found, mine = _numbers(trainer)
    assert found == expected, name
    check_same_bits(mine, weights, name)
    for chunk, fake in zip(trainer.chunks, fakes, strict=True):
        assert not chunk._layers.ran_eagerly
        assert fake.captures == 2 * layers * fake.pools, (name, fake.captures, fake.pools)
        assert len(fake.replays) == (STEPS - 1) * case.microbatches * 2 * layers
        for pool in range(1, fake.pools + 1):
            order = [number for where, number in fake.replays if where == pool]
            once = list(range(1, 2 * layers + 1))
            assert order == once * (len(order) // len(once)), (name, pool)
    assert max(fake.pools for fake in fakes) <= in_flight


@pytest.mark.parametrize(("name", "layers"), (("pp2", 2), ("pp2-vpp2", 1)))
@on_ranks(2)
def test_pipelines_replay_to_the_bits_of_eager_steps(rank: int, name: str, layers: int) -> None:
    _trains_alike(name, layers, in_flight=2 - rank if name == "pp2" else 4)


@pytest.mark.parametrize(
    ("parts", "dispatcher"), ((False, "alltoall"), (False, "allgather"), (True, "alltoall"))
)
@on_ranks(2)
def test_experts_replay_to_the_bits_of_eager_steps(parts: bool, dispatcher: str) -> None:
    """Both dispatchers read numbers of tokens on the host."""
    with _weights_are_fresh() as captured:
        _trains_alike("ep2", layers=4, in_flight=1, parts=parts, dispatcher=dispatcher)
    assert len(captured) == 4
