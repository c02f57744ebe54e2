"""Buckets of an exchange hold gradients as autograd gives them, where no module writes wider ones:
the sums have the bits of float32 pieces, at half the bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_fsdp_adapter.core.config import EngineConfig
from megatron_fsdp_adapter.core.engine.wgrad import WgradProtocol
from megatron_fsdp_adapter.core.runtime.device import HostRuntime
from megatron_fsdp_adapter.core.runtime.sums import sum_rows
from megatron_fsdp_adapter.diagnostics.memory import (
    BUCKET_SLOTS,
    RECEIVED_PIECES,
    REDUCE_BUCKET,
    Precision,
    with_slots,
)
from tests.engine.engine_cases import Setup, build
from tests.engine.engine_scenarios import SCENARIOS
from tests.engine.pretended import PretendCommunicator, pretended_world

FP32, BF16 = torch.float32, torch.bfloat16
EXCHANGE = Setup("optim_grads_params", world=3, rank=1, slots=True, exchange=True)
VARIANTS: dict[str, dict[str, Any]] = {
    "all from autograd": {},
    "weights that stay": {"strategy": "optim_grads"},
    "layers write their own": {"fused": WgradProtocol.OVERWRITES},
    "tied": {"tied": True},
    "recomputed": {"recompute": "reentrant"},
    "units that keep": {"own": ("optim", "optim_grads", "optim_grads_params")},
    "bf16 main gradients, fp32 wire": {"main_grads": BF16, "comm_dtype": FP32},
    "two domains": {"split": True, "world": 4},
}


def trained(setup: Setup) -> tuple[dict[str, torch.Tensor], dict[str, torch.dtype]]:
    """Weights after three steps and a late gradient, and the dtype of each group's bucket."""
    with pretended_world(setup.world, setup.rank):
        rig = build(setup, HostRuntime(), PretendCommunicator)
        for _ in range(3):
            rig.step(microbatches=2)
        SCENARIOS["gradients_late"](rig)
        dtypes = {group.name: group.bucket.tensor.dtype for group in rig.engine.groups}
        return rig.weights(), dtypes


@pytest.mark.parametrize("name", VARIANTS)
def test_training_has_the_bits_of_buckets_in_the_dtype_of_the_wire(name, monkeypatch):
    setup = EXCHANGE.but(**VARIANTS[name])
    narrow, dtypes = trained(setup)
    monkeypatch.setattr(EngineConfig, "narrows_buckets", property(lambda self: False))
    wide, wide_dtypes = trained(setup)
    assert BF16 in dtypes.values() and set(wide_dtypes.values()) == {FP32}
    for key, value in wide.items():
        assert torch.isfinite(value).all() and torch.equal(value, narrow[key]), key


def bucket_dtypes(**changes: Any) -> dict[str, torch.dtype]:
    setup = EXCHANGE.but(**changes)
    with pretended_world(setup.world, setup.rank):
        units = build(setup, HostRuntime(), PretendCommunicator).engine.units
        return {unit.name: one.bucket.tensor.dtype for unit in units for one in unit.groups}


def test_where_it_would_round_buckets_have_the_dtype_of_the_wire():
    """What modules write by themselves is float32; scaled before the sum, bf16 would be rounded;
    without an exchange NCCL adds in the dtype that travels; a layer in float32 has float32."""
    fused = bucket_dtypes(fused=WgradProtocol.OVERWRITES)
    assert fused["embedding"] == fused["head"] == BF16, fused
    assert fused["layers.0"] == FP32
    for changes in ({"scale_before_sum": True}, {"exchange": False}, {"dtype": FP32}):
        assert set(bucket_dtypes(**changes).values()) == {FP32}, changes


@pytest.mark.parametrize("name", ("all from autograd", "layers write their own", "units that keep"))
def test_slots_and_received_pieces_are_those_of_the_formula(name):
    setup = EXCHANGE.but(**VARIANTS[name])
    with pretended_world(setup.world, setup.rank):
        engine = build(setup, HostRuntime(), PretendCommunicator).engine
    rows = [unit.groups[0].config.strategy for unit in engine.units]
    held = with_slots(
        {REDUCE_BUCKET: 0}, [unit.name.split(".")[0] for unit in engine.units],
        [[group.layout for group in unit.groups] for unit in engine.units],
        setup.config.strategy, Precision(), rows,
        weight_slots=True, bucket_slots=True, all_to_all_gradients=True,
    )  # fmt: skip
    memory = next(g.staging.buckets for g in engine.groups if g.staging.buckets).memory
    assert held[BUCKET_SLOTS] == sum(slot.numel() for slot in memory)
    assert held[RECEIVED_PIECES] == engine.reduce._received.numel()


@pytest.mark.parametrize("count", range(1, 9))
@pytest.mark.parametrize("accumulate", [False, True])
def test_sums_of_bf16_rows_are_those_of_their_casts(count, accumulate):
    rows = torch.randn(count, 5000).to(BF16)
    one, other = torch.zeros(2, 5000)
    one.copy_(torch.randn(5000))
    other.copy_(one)
    sum_rows(rows, one, 1 / 3, accumulate)
    sum_rows(rows.float(), other, 1 / 3, accumulate)
    assert torch.equal(one, other)
