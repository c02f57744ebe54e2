"""The closed formula for bytes per rank, against sums written out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron_fsdp_adapter.core.config import STRATEGIES
from megatron_fsdp_adapter.core.layout import GroupLayout, plan_group
from megatron_fsdp_adapter.plan.memory import (
    Precision,
    bytes_between_steps,
    group_bytes,
    model_bytes,
)
from tests.lib.layout.layout_cases import specs_of

CHECKS = ("plan/memory.py",)


def planned(dtype: torch.dtype, requires_grad: bool = True) -> GroupLayout:
    """100 elements of parameters on 4 shards of 32: ranks hold 32, 32, 32 and 4 of them."""
    specs = []
    for spec in specs_of([(5, 16), (20,)]):
        specs.append(replace(spec, dtype=dtype, requires_grad=requires_grad))
    layout = plan_group(specs, 4, align=16)
    assert layout.total_numel == 128
    assert layout.shard_numel == 32
    assert layout.item_numel == 100
    return layout


BF16 = {
    "no_shard": {
        "compute weights": 256,
        "main weights": 512,
        "main gradients": 512,
        "optimizer state": 800,
    },
    "optim": {
        "compute weights": 256,
        "main weights": 128,
        "main gradients": 512,
        "optimizer state": 8 * 4,
    },
    "optim_grads": {
        "compute weights": 256,
        "main weights": 128,
        "gradient shard": 128,
        "reduce bucket": 512,
        "optimizer state": 8 * 4,
    },
    "optim_grads_params": {
        "gathered weights": 256,
        "main weights": 128,
        "gradient shard": 128,
        "reduce bucket": 512,
        "optimizer state": 8 * 4,
    },
}


FP32 = {}
for strategy in ("no_shard", "optim", "optim_grads"):
    FP32[strategy] = BF16[strategy] | {"compute weights": 512}
    del FP32[strategy]["main weights"]
FP32["optim_grads_params"] = BF16["optim_grads_params"] | {"gathered weights": 512}
"""Main weights of their own only where weights are sharded."""
FROZEN = {key: {"compute weights": 256} for key in BF16}
FROZEN["optim_grads_params"] = {"gathered weights": 256, "main weights": 64}
NARROW = {
    "optim_grads": {
        "compute weights": 256,
        "gradient shard": 64,
        "reduce bucket": 512,
        "optimizer state": 2 * 32,
    }
}
NARROW_MAIN = Precision(torch.bfloat16, torch.bfloat16, torch.float32, state_bytes=2)
GROUPS = {
    "bf16": (planned(torch.bfloat16), Precision(), 3, BF16),
    "fp32": (planned(torch.float32), Precision(), 3, FP32),
    "frozen": (planned(torch.bfloat16, False), Precision(), 0, FROZEN),
    "bf16 main weights and gradients": (planned(torch.bfloat16), NARROW_MAIN, 0, NARROW),
}


@pytest.mark.parametrize("name", GROUPS)
def test_bytes_of_a_group(name: str) -> None:
    layout, precision, rank, expected = GROUPS[name]
    for row, nbytes in expected.items():
        assert group_bytes(layout, STRATEGIES[row], precision, rank) == nbytes, row


def test_a_model_holds_the_root_unit_beside_the_two_largest() -> None:
    def unit(gathered: int, bucket: int, main: int) -> dict[str, int]:
        return {"gathered weights": gathered, "reduce bucket": bucket, "main weights": main}

    root = unit(5, 50, 1)
    units = [unit(10, 30, 2), unit(30, 20, 3), unit(20, 60, 4)]
    total = model_bytes(root, units)
    assert total == {"main weights": 10, "gathered weights": 55, "reduce bucket": 110}
    assert bytes_between_steps(total) == 10
    assert model_bytes({"main weights": 3}, [{"main weights": 4}]) == {"main weights": 7}
