"""Main gradients, communication and sums in dtypes of their own: no buffer that the formula does
not name, and buckets as narrow as the gradients where that changes no bit."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megatron_fsdp_adapter.comm.all_to_all_sum import FIXED_ALL_TO_ALL_SUM
from megatron_fsdp_adapter.core.config import STRATEGIES
from megatron_fsdp_adapter.core.runtime.device import HostRuntime, storage_bytes
from megatron_fsdp_adapter.core.topology import DENSE
from megatron_fsdp_adapter.diagnostics.memory import (
    BUCKET_SLOTS,
    GRADIENT_SHARD,
    LIFE,
    OPTIMIZER_STATE,
    PERSISTENT,
    RECEIVED_PIECES,
    REDUCE_BUCKET,
    Precision,
    group_bytes,
    with_slots,
)
from tests.distributed.memory import Baseline
from tests.engine.engine_cases import Setup, buffers_of, build
from tests.engine.pretended import PretendCommunicator, pretended_world
from tests.engine.scenarios import BF16, FP32, FUSED, SCENARIOS, ZERO_3, cells


@pytest.fixture
def frozen_past() -> Iterator[None]:
    """What was made before is not looked through again: counting takes a tenth of the time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


class Tally(HostRuntime):
    """Remembers the most bytes of transient buckets that existed at once."""

    def __init__(self) -> None:
        super().__init__()
        self.buckets: list[torch.Tensor] = []
        self.most = 0

    def allocate(self, flat: torch.Tensor) -> None:
        super().allocate(flat)
        self.most = max(self.most, sum(map(storage_bytes, self.buckets)))


@pytest.mark.usefixtures("frozen_past")
@pytest.mark.parametrize(
    ("strategy", "scenario"),
    cells("steps", "bf16_comm", "bf16_grads", "bf16_grads_fp32_comm", "own_main", "fp32_sums"),
)
def test_gradient_buffers_are_those_of_the_formula(strategy, scenario):
    """Every floating-point storage that is alive is counted; the engine is not asked. At rest, with
    gradients, and the most that reductions need at once."""
    setup = SCENARIOS[scenario].setup(strategy, world=4, rank=2, layers=2)
    policy, baseline = setup.config.policy, Baseline()
    precision = Precision(setup.main_params, policy.grads_dtype, policy.comm_dtype, 0)
    with pretended_world(4, 2):
        baseline.take(torch.nn.Module())
        rig = build(setup, Tally())
        pretended = {t.untyped_storage()._cdata: storage_bytes(t) for t in rig.initial.values()}
        held = [[group_bytes(group.layout, setup.config.strategy, precision, 2)
                 for group in unit.groups] for unit in rig.engine.units]  # fmt: skip
        of_kind = [(kind, count) for unit in held for one in unit for kind, count in one.items()]
        kept = sum(pretended.values()) + sum(
            count for kind, count in of_kind if LIFE[kind] == PERSISTENT and kind != OPTIMIZER_STATE
        )
        shards = sum(count for kind, count in of_kind if kind == GRADIENT_SHARD)
        units = [sum(one.get(REDUCE_BUCKET, 0) for one in unit) for unit in held]
        if any(units):
            flats = buffers_of(rig.engine)
            rig.runtime.buckets = [flat for name, flat in flats if name.endswith(".bucket")]
        for microbatches, expected in ((1, kept), (2, kept + shards)):
            rig.forward_backward(microbatches)
            rig.finish()
            if microbatches == 1:
                rig.zero()
            rig.engine.gather.reshard_all()
            assert baseline.live_bytes() == expected
        assert rig.runtime.most <= sum(sorted(units)[-2:])
        assert (rig.runtime.most >= max(units) > 0) is any(units)


EXCHANGE = Setup(ZERO_3, world=3, rank=1, slots=True, exchange=True)
FP32_UNITS = {f"layers.{i}" for i in range(4)}
WIDE: dict[str, tuple[dict[str, Any], set[str]]] = {
    "what autograd gives is in bf16": ({}, set()),
    "bf16 main gradients, fp32 wire": ({"main_grads": BF16, "comm_dtype": FP32}, set()),
    "what layers write by themselves is float32": (FUSED, FP32_UNITS),
    "scaled before the sum, bf16 would be rounded": (
        {"scale_before_sum": True}, {*FP32_UNITS, "embedding", "head", "root"},
    ),
    "without an exchange NCCL adds in the dtype that travels": (
        {"exchange": False}, {*FP32_UNITS, "embedding", "head", "root"},
    ),
    "a layer in float32 has float32": (
        {"dtype": FP32}, {*FP32_UNITS, "embedding", "head", "root"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WIDE)
def test_buckets_have_the_dtype_of_the_wire_where_another_would_round(name):
    changes, wide = WIDE[name]
    with pretended_world(3, 1):
        units = build(EXCHANGE.but(**changes), HostRuntime(), PretendCommunicator).engine.units
        dtypes = {unit.name: one.bucket.tensor.dtype for unit in units for one in unit.groups}
    assert {unit for unit, dtype in dtypes.items() if dtype == FP32} == wide
    assert set(dtypes.values()) <= {FP32, BF16}


@pytest.mark.parametrize("changes", [{}, FUSED, {"own": tuple(STRATEGIES)[1:]}], ids=str)
def test_slots_and_received_pieces_are_those_of_the_formula(changes):
    setup = EXCHANGE.but(**changes)
    with pretended_world(3, 1):
        engine = build(setup, HostRuntime(), PretendCommunicator).engine
    held = with_slots(
        {REDUCE_BUCKET: 0}, [unit.name.split(".")[0] for unit in engine.units],
        [[group.layout for group in unit.groups] for unit in engine.units],
        setup.config.strategy, Precision(),
        [unit.groups[0].config.strategy for unit in engine.units],
        weight_slots=True, bucket_slots=True, reduce_scatter=FIXED_ALL_TO_ALL_SUM,
    )  # fmt: skip
    slots = [group.bucket_slot for group in engine.groups if group.bucket_slot.memory is not None]
    assert held[BUCKET_SLOTS] == sum({slot.number: slot.memory.numel() for slot in slots}.values())
    assert held[RECEIVED_PIECES] == engine.reduce.domains[DENSE].received.nbytes
