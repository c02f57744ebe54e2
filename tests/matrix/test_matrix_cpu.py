"""Cells of the CPU matrix against stock DDP: a slice by default, all with --full. On GPUs:
tests/gpu/test_gpu_matrix.py."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.lib.matrix import cells, training
from tests.lib.matrix.bounds import bounds_of
from tests.lib.matrix.table import REFERENCE, Cell, cell_named, name_of
from tests.lib.matrix.training import Findings, check_cell, checked_cell, wrong
from tests.lib.ranks.groups import everyones
from tests.lib.ranks.shared_ranks import on_ranks

CHECKS = ("core/engine/engine.py", "megatron/wrapper/adapter.py", "optim/step.py")

ALL = cells.cached("cpu")
OF_FOUR = 5
"""How many cells of four ranks are in the slice; those of two all are."""
SLICE = [
    *(cell for cell in ALL if cell["ranks"] == 2),
    *[cell for cell in ALL if cell["ranks"] == 4][:OF_FOUR],
]


@pytest.mark.parametrize(
    ("cell", "world"),
    [
        pytest.param(
            cell, cell["ranks"], marks=() if cell in SLICE else pytest.mark.full, id=name_of(cell)
        )
        for cell in ALL
    ],
)
@on_ranks(seconds=100.0)
def test_cell(cell: Cell) -> None:
    """Gradients, norm and loss of the first step, loss and norm of two more, and how far the
    weights have moved."""
    checked_cell(cell, "tiny")


# What the comparison would see. FP8 and experts have the widest bounds.


PLAIN = "cpu microbatches=3"
WIDE = "cpu precision=bf16 layers=moe wire=bf16"


@on_ranks(2)
def test_the_comparison_sees_a_lost_element_within_the_widest_bounds_too() -> None:
    """Of one shard, on one rank."""

    def schedule(trainer: Any, step: int, **more: Any) -> float:
        loss = original(trainer, step, **more)
        if trainer.strategy is not None and dist.get_rank() == 1:
            _, pair = next(iter(trainer._pairs()))
            local = pair.sharded.grad._local_tensor.view(-1)
            local[local.abs().argmax()] = 0.0
        return loss

    original = training.run_schedule
    fp8 = bounds_of(cell_named("gpu precision=fp8_delayed layers=te_grouped wire=bf16"))
    for name, bounds in ((PLAIN, None), (WIDE, fp8)):
        with (
            mock.patch.object(training, "run_schedule", schedule),
            mock.patch.object(training, "bounds_of", lambda c, b=bounds: b or bounds_of(c)),
        ):
            found = check_cell(cell_named(name), "tiny")
        here = [measure for measure, one in found.items() if not one.holds]
        seen = set().union(*everyones(here))
        assert "gradient, element" in seen, (name, seen)


@pytest.mark.parametrize("more", ("", " strategy=optim vpp=2"))
@on_ranks(2)
def test_a_tied_weight_of_the_last_stage_has_all_its_fused_gradients(more: str) -> None:
    """Its embedding is there for multi-token prediction, and its weight is handed to the output
    layer twice. Stock DDP with fused gradients loses the embedding's: the reference is unfused."""
    cell = cell_named(f"cpu{more} fusion=on microbatches=3 trained=tied layers=mtp pp=2")
    with mock.patch.object(training, "REFERENCE", {**REFERENCE, "fusion": "off"}):
        assert wrong(check_cell(cell, "tiny")) == []


def test_not_a_number_does_not_hold() -> None:
    findings: Findings = {}
    for error in (0.5, float("nan"), 0.1):
        training._note(findings, "m", training.Finding(error, 1.0, ""))
    assert not findings["m"].holds
    assert training._peak(torch.tensor([1.0, float("nan")])) == float("inf")
    assert training._peak(torch.tensor([])) == 0.0
