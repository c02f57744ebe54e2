"""Buckets as narrow as the gradients where that changes no bit, and slots of the bytes that the
formula says. What buffers of other dtypes take: tests/plan/test_memory.py and
tests/plan/test_layout_memory.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_fsdp_adapter.core.comm.all_to_all_sum import FIXED_ALL_TO_ALL_SUM
from megatron_fsdp_adapter.core.comm.communicator import Pair
from megatron_fsdp_adapter.core.config import STRATEGIES
from megatron_fsdp_adapter.core.engine import reduction
from megatron_fsdp_adapter.core.runtime.device import HostRuntime
from megatron_fsdp_adapter.core.topology import DENSE
from megatron_fsdp_adapter.plan.memory import (
    BUCKET_SLOTS,
    RECEIVED_PIECES,
    REDUCE_BUCKET,
    PlacedGroup,
    Precision,
    with_slots,
)
from tests.lib.engine.engine_cases import build
from tests.lib.engine.pretended import PretendCommunicator, pretended_world
from tests.lib.engine.scenarios import BF16, FP32, FUSED, ZERO_1, ZERO_2, ZERO_3
from tests.lib.engine.small_model import Setup

CHECKS = (
    "core/comm/communicator.py",
    "core/engine/reduce.py",
    "core/engine/reduction.py",
    "core/comm/all_to_all_sum.py",
    "core/engine/buffer.py",
)

EXCHANGE = Setup(ZERO_3, world=3, rank=1, slots=True, exchange=True)
FP32_UNITS = {f"layers.{i}" for i in range(4)}
UNITS = {*FP32_UNITS, "embedding", "head", "root"}
WIDE = {
    "what autograd gives is in bf16": ({}, set()),
    "bf16 main gradients, fp32 wire": ({"main_grads": BF16, "comm_dtype": FP32}, set()),
    "what layers write by themselves is float32": (FUSED, FP32_UNITS),
    "scaled before the sum, bf16 would be rounded": ({"scale_before_sum": True}, UNITS),
    "without an exchange NCCL adds in the dtype that travels": ({"exchange": False}, UNITS),
    "a layer in float32 has float32": ({"dtype": FP32}, UNITS),
}


@pytest.mark.parametrize("name", WIDE)
def test_buckets_have_the_dtype_of_the_wire_where_another_would_round(name):
    changes, wide = WIDE[name]
    setup = EXCHANGE.but(**changes)
    with pretended_world(3, 1):
        engine = build(setup, HostRuntime(), PretendCommunicator).engine
    dtypes = {}
    for unit in engine.units:
        for group in unit.groups:
            dtypes[unit.name] = group.grads.bucket.tensor.dtype
    assert {unit for unit, dtype in dtypes.items() if dtype == FP32} == wide
    assert set(dtypes.values()) <= {FP32, BF16}


APART = [{"split": True, "split_strategy": name} for name in (ZERO_1, ZERO_2)]


@pytest.mark.parametrize("changes", [{}, FUSED, {"own": tuple(STRATEGIES)[1:]}, *APART], ids=str)
def test_slots_and_received_pieces_are_those_of_the_formula(changes):
    setup = EXCHANGE.but(**changes)
    with pretended_world(3, 1):
        engine = build(setup, HostRuntime(), PretendCommunicator).engine
    kinds = []
    units = []
    for unit in engine.units:
        kinds.append(unit.name.split(".")[0])
        groups = []
        for group in unit.groups:
            of_domain = setup.config.of_domain(group.key.domain).strategy
            row = group.config.strategy
            groups.append(PlacedGroup(group.layout, 1, group.is_single_rank, row, of_domain))
        units.append(groups)
    held = with_slots(
        {REDUCE_BUCKET: 0},
        kinds,
        units,
        Precision(),
        weight_slots=True,
        bucket_slots=True,
        reduce_scatter=FIXED_ALL_TO_ALL_SUM,
    )
    slots = {}
    for grads in engine.grads:
        slot = grads.slot
        if slot.memory is not None:
            slots[slot.number] = slot.memory.numel()
    assert held[BUCKET_SLOTS] == sum(slots.values())
    assert held[RECEIVED_PIECES] == engine.reduce.domains[DENSE].received.nbytes


class Averaging(PretendCommunicator):
    """A communicator that can average, as NCCL's. Counts averages."""

    averages = True
    count = 0

    def launch(self, name: str, pairs: Sequence[Pair], **options: Any) -> list[Any]:
        works = super().launch(name, pairs, **options)
        if options.get("op") == dist.ReduceOp.AVG:
            Averaging.count += 1
            for output, _ in pairs:
                output.div_(self.size)
        return works


FSDP2 = Setup(ZERO_3, world=4, main_params=None, dtype=FP32, as_fsdp2=True)
AVERAGED = {
    "gradients are sent as they are": (FSDP2, True),
    "they are sent in bfloat16": (FSDP2.but(comm_dtype=BF16), True),
    "by another factor": (FSDP2.but(grad_scale=0.5), False),
    "of a dtype with little range": (FSDP2.but(comm_dtype=torch.float16), False),
    "scaled before the sum": (FSDP2.but(scale_before_sum=True), False),
    "the ranks are not those of the mean": (FSDP2.but(outer=2), False),
    "not as FSDP2": (FSDP2.but(as_fsdp2=False), False),
}


@pytest.mark.parametrize("name", AVERAGED)
def test_a_collective_that_can_average_saves_the_pass_that_scales(name):
    setup, averages = AVERAGED[name]
    weights = []
    passes = []
    for communicator in (PretendCommunicator, Averaging):
        scaled = []
        Averaging.count = 0

        def noted(tensors, scale, apply=reduction.scale_each, factors=scaled):
            if scale != 1.0:
                factors.append(scale)
            apply(tensors, scale)

        with mock.patch.object(reduction, "scale_each", noted), pretended_world(4, 0):
            rig = build(setup, HostRuntime(), communicator)
            rig.step(microbatches=2)
            rig.step()
            weights.append(rig.weights())
        passes.append(len(scaled))
    assert weights[0].keys() == weights[1].keys()
    for label, value in weights[0].items():
        assert torch.equal(value, weights[1][label]), label
    assert (Averaging.count > 0) == averages
    assert (passes[1] < passes[0]) == averages
