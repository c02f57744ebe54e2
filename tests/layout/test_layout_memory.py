"""The closed formula for bytes per rank, against sums written out by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from layout_cases import layouts, specs_of

from megatron_fsdp_adapter.core.config import STRATEGIES
from megatron_fsdp_adapter.core.layout import GroupLayout, plan_group
from megatron_fsdp_adapter.diagnostics.memory import (
    Precision,
    bytes_between_steps,
    group_bytes,
    held_by_rank,
    model_bytes,
    unit_bytes,
    updated_numel,
)


def planned(dtype: torch.dtype, requires_grad: bool = True) -> GroupLayout:
    """100 elements of parameters on 4 shards of 32: ranks hold 32, 32, 32 and 4 of them."""
    specs = [
        replace(spec, dtype=dtype, requires_grad=requires_grad)
        for spec in specs_of([(5, 16), (20,)])
    ]
    layout = plan_group(specs, 4, align=16)
    assert (layout.total_numel, layout.shard_numel, layout.item_numel) == (128, 32, 100)
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


FP32 = {
    name: {kind: count for kind, count in held.items() if kind != "main weights"}
    | {"compute weights": 512}
    for name, held in BF16.items() if name != "optim_grads_params"
} | {"optim_grads_params": BF16["optim_grads_params"] | {"gathered weights": 512}}  # fmt: skip
"""Main weights of their own only where weights are sharded."""
FROZEN = {key: {"compute weights": 256} for key in BF16} | {
    "optim_grads_params": {"gathered weights": 256, "main weights": 64}
}
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
    found = {row: group_bytes(layout, STRATEGIES[row], precision, rank) for row in expected}
    assert found == expected


def test_a_model_holds_the_root_unit_beside_the_two_largest() -> None:
    def unit(gathered: int, bucket: int, main: int) -> dict[str, int]:
        return {"gathered weights": gathered, "reduce bucket": bucket, "main weights": main}

    root, units = unit(5, 50, 1), [unit(10, 30, 2), unit(30, 20, 3), unit(20, 60, 4)]
    total = model_bytes(root, units)
    assert total == {"main weights": 10, "gathered weights": 55, "reduce bucket": 110}
    assert bytes_between_steps(total) == 10
    assert model_bytes({"main weights": 3}, [{"main weights": 4}]) == {"main weights": 7}


@pytest.mark.parametrize(
    ("name", "held"),
    [
        ("no_shard", 256 + 512 + 512 + 800),
        ("optim", 256 + 128 + 512 + 32),
        ("optim_grads", 256 + 128 + 32),
        ("optim_grads_params", 128 + 32),
    ],
)
def test_what_is_held_between_steps(name: str, held: int) -> None:
    assert bytes_between_steps(BF16[name]) == held


def test_a_unit_is_the_sum_of_its_groups() -> None:
    layout, row = planned(torch.bfloat16), STRATEGIES["optim"]
    one = group_bytes(layout, row, Precision(), 1)
    both = unit_bytes([layout, layout], row, Precision(), 1)
    assert both == {kind: 2 * count for kind, count in one.items()}


@given(layouts())
def test_optimizer_state_covers_every_element_once(layout: GroupLayout) -> None:
    held, row = held_by_rank(layout), STRATEGIES["optim_grads_params"]
    assert held == [updated_numel(layout, row, rank) for rank in range(layout.num_shards)]
    assert sum(held) == layout.item_numel
    assert max(held) <= layout.shard_numel
    states = [group_bytes(layout, row, Precision(), rank) for rank in range(layout.num_shards)]
    assert sum(state["optimizer state"] for state in states) == 8 * sum(
        math.prod(spec.shape) for spec in layout.specs
    )
