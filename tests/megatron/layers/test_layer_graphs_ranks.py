"""CUDA graphs of layers, noted and replayed on the host, in pipelines and with experts: the numbers
are those of the same wrapper without them, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_fsdp_adapter.graphs.captured import CapturedCall
from tests.lib.engine.fake_graphs import FakeGraphs, has_accumulator, put_graphs_into
from tests.lib.gpt.topologies import TOPOLOGIES, TopologyTrainer
from tests.lib.gpt.variants import ZERO_3, Variant, compare, marked, train_and_evaluate
from tests.lib.ranks.one_rank import as_one_of_many
from tests.lib.ranks.shared_ranks import on_ranks

CHECKS = ("megatron/layers/layer_graphs.py", "graphs/layer_graphs.py", "graphs/captured.py")

EP2 = TOPOLOGIES["ep2"]
SLOTS = {"fsdp_double_buffer": True}
PARTS = {**SLOTS, "megatron_fsdp_enable_fine_grained_param_gather": True}


@contextmanager
def weights_are_fresh() -> Iterator[None]:
    """Inside, no graph of an earlier step knows a weight that a capture begins to use."""
    original = CapturedCall.record

    def record(self: CapturedCall, *args: Any) -> Any:
        params = []
        for group, indices in self.site.parts:
            for i in indices:
                params.append(group.params[i])
        assert not any(map(has_accumulator, params)), self.site.name
        return original(self, *args)

    with mock.patch.object(CapturedCall, "record", record):
        yield


def with_graphs(trainer: TopologyTrainer) -> None:
    for chunk in trainer.chunks:
        chunk.fake = FakeGraphs()
        put_graphs_into(chunk, chunk.fake)


def all_is_replayed(ours: Any, reference: Any, strategy: str) -> None:
    """From the second step on, each pass in flight from a pool of its own."""
    layers = ours.case.num_layers // (ours.topology.pp * ours.topology.num_chunks)
    for chunk in ours.chunks:
        assert not chunk._layers.ran_eagerly
        assert chunk.fake.captures == 2 * layers * chunk.fake.pools
        assert len(chunk.fake.replays) == 2 * ours.case.microbatches * 2 * layers
        assert chunk.fake.pools <= {"pp2": 2 - torch.distributed.get_rank(), "ep2": 1}.get(
            ours.topology.name, 4
        )


ROWS = tuple(
    Variant(
        name,
        (ZERO_3,),
        topology=topology,
        ddp=ddp,
        case={"microbatches": 4, "num_layers": 4},
        around=around,
        begin=with_graphs,
        drive=train_and_evaluate,
        expect=all_is_replayed,
        compare="bits",
        reference={"strategy": "own", "ddp": ddp},
    )
    for name, topology, ddp, around in (
        # Of several passes in flight the later ones capture what the first has used.
        ("pipeline", TOPOLOGIES["pp2"], SLOTS, as_one_of_many),
        ("pipeline, gradients add", TOPOLOGIES["pp2"], {}, nullcontext),
        ("interleaved pipeline", TOPOLOGIES["pp2-vpp2"], SLOTS, as_one_of_many),
        # Both dispatchers read numbers of tokens on the host.
        ("experts", EP2, SLOTS, weights_are_fresh),
        ("experts, allgather", replace(EP2, dispatcher="allgather"), SLOTS, weights_are_fresh),
        ("experts are units", EP2, PARTS, weights_are_fresh),
    )
)


@pytest.mark.parametrize("row", marked(ROWS))
@on_ranks()
def test_replays_train_to_the_bits_of_eager_steps(row: Variant, rank: int, seed: int) -> None:
    compare(row, rank, seed)
