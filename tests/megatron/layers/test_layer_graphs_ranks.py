"""CUDA graphs of layers, noted and replayed on the host, in pipelines and with experts: the numbers
are those of the same wrapper without them, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_fsdp_adapter.core.runtime.device import storage_bytes
from megatron_fsdp_adapter.graphs.captured import CapturedCall
from megatron_fsdp_adapter.plan.unsharded_budget import AUTO, GIB
from megatron_fsdp_adapter.plan.unsharded_budget import BUDGET_OPTION as BUDGET
from tests.lib.engine.fake_graphs import FakeGraphs, has_accumulator, put_graphs_into
from tests.lib.gpt.gpt import Trainer
from tests.lib.gpt.topologies import TOPOLOGIES, TopologyTrainer
from tests.lib.gpt.units import ALL_GIB, KEPT_CASE, NEAR
from tests.lib.gpt.variants import (
    ZERO_1,
    ZERO_3,
    Variant,
    compare,
    marked,
    train_and_evaluate,
)
from tests.lib.ranks.one_rank import as_one_of_many
from tests.lib.ranks.shared_ranks import on_ranks
from tests.lib.ranks.spare_memory import agree_on, spare

CHECKS = (
    "megatron/layers/layer_graphs.py",
    "graphs/layer_graphs.py",
    "graphs/captured.py",
    "graphs/sites.py",
)

EP2 = TOPOLOGIES["ep2"]
SLOTS = {"fsdp_double_buffer": True}
SOME_BYTES = 60_000
"""For the weights of all units, and for gradients of the first layer."""
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


def with_graphs(trainer: Trainer | TopologyTrainer) -> None:
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


def agreed(trainer: Trainer) -> None:
    """A budget for all units is agreed on before the first step."""
    agree_on(trainer.chunks, int(ALL_GIB * GIB))
    with_graphs(trainer)


def captures(pools: int, captured: int, eager: str = "") -> Any:
    """Expects so many pools, and calls that were captured last; memory of others comes and goes.
    eager: in the summary, that layers ran eagerly."""

    def check(ours: Any, reference: Any, strategy: str) -> None:
        (chunk,) = ours.chunks
        graphs = chunk._layers
        found = (chunk.fake.pools, graphs.captured, graphs.replayed > 0)
        assert found == (pools, captured, True), found
        assert eager in graphs.summary()
        assert ("ran eagerly" in graphs.summary()) == bool(eager)
        chunk.zero_grad_buffer()
        chunk.stop_communication()  # weights that an evaluation has left go
        fixed = {site.unit.ordinal for site in graphs._fixed}
        assert len(fixed) == captured
        ahead = chunk.engine.order.first()  # gathered for the next forward
        for unit in chunk.engine.units:
            stays = unit.ordinal in fixed
            for group in unit.groups:
                assert bool(storage_bytes(group.grads.bucket.tensor)) == stays
                for weights in group.weights.unsharded if unit.ordinal not in ahead else ():
                    assert bool(storage_bytes(weights.tensor)) == stays

    return check


FOUND_CASE = {**KEPT_CASE, "fused": True}
FOUND = Variant(
    "a budget that is found",
    (ZERO_3,),
    case=FOUND_CASE,
    ddp={BUDGET: AUTO},
    around=partial(spare, int(ALL_GIB * GIB)),
    begin=agreed,
    drive=train_and_evaluate,
    steps=4,
    compare="bits",
    reference={"strategy": ZERO_1, "ddp": {}},
    expect=captures(pools=1, captured=4),
)
ROWS += (
    FOUND,
    FOUND.but("the same, one microbatch", case={**FOUND_CASE, "microbatches": 1}),
    # From the fifth step on three layers fewer: the device has less memory than was agreed on.
    FOUND.but(
        "a budget that becomes less",
        around=partial(spare, SOME_BYTES),
        steps=7,
        compare=NEAR,
        expect=captures(2, 1, "3 ran eagerly: their units do not stay unsharded"),
    ),
)


@pytest.mark.parametrize("row", marked(ROWS))
@on_ranks()
def test_replays_train_to_the_bits_of_eager_steps(row: Variant, rank: int, seed: int) -> None:
    compare(row, rank, seed)
