"""Ranks that use different units, or use them in another order."""

from __future__ import annotations

import re
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from megatron_fsdp_adapter.core.config import STRATEGIES
from tests.lib.gpt.checks import check_weights
from tests.lib.gpt.gpt import full_all
from tests.lib.plain.late_gradients import trained
from tests.lib.plain.launches import HANGS, LIKE, UNLIKE, Chosen, Path, _fresh, loss_of, sharded
from tests.lib.plain.plain import Side
from tests.lib.ranks.groups import everyones
from tests.lib.ranks.launch import settle_ranks
from tests.lib.ranks.shared_ranks import on_ranks

CHECKS = ("core/engine/launches.py", "core/engine/construction.py")

STEPS = 4


def _step(model: Any, optimizer: Any, step: int, rank: int, path: Path) -> None:
    loss_of(model, step, rank, path).backward()
    optimizer.step()
    optimizer.zero_grad()


def _error_of_a_step(model: Any, optimizer: Any, rank: int, world: int, path: Any) -> str:
    """The same on all ranks; it names what the second one has launched, and what the others."""
    with pytest.raises(RuntimeError) as caught:
        _step(model, optimizer, 0, rank, path(rank, 0))
    text = str(caught.value)
    assert everyones(text) == [text] * world
    others = [rank for rank in range(world) if rank != 1]
    found = dict(re.findall(r"  - ranks (\[.*\]): (?:weights|gradients) of (\S+) ", text))
    assert found.keys() == {str(others), "[1]"}, text
    assert {found[str(others)], found["[1]"]} <= {f"blocks.{i}/dense" for i in range(4)}, text
    assert "launched different collectives" in text, text
    assert "times 0" in text, text
    return text


@pytest.mark.parametrize("world", (2, pytest.param(3, marks=pytest.mark.full)))
@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks()
def test_ranks_that_use_other_units_are_told_so_and_like_ones_train(
    rank: int, world: int, strategy: str
) -> None:
    """Units of one size: nothing else says so."""
    for path in LIKE.values():
        model, optimizer = sharded(strategy)
        for step in range(STEPS):
            _step(model, optimizer, step, rank, path(rank, step))
    for name, path in UNLIKE.items():
        if (name, strategy) in HANGS:
            continue
        model, optimizer = sharded(strategy)
        _error_of_a_step(model, optimizer, rank, world, path)
        kept = full_all(dict(model.named_parameters()))
        assert all(torch.equal(kept[f"module.{n}"], p) for n, p in _fresh().named_parameters())


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_ranks_along_the_outer_axis_are_compared(rank: int, strategy: str) -> None:
    """Where units are reduced over it one by one, in the backward that is known to be the last.
    Otherwise that is done at the step's end, in one order, and is right."""
    world = 2
    mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("outer", "shard"))
    path = UNLIKE["another order"]
    sides = Side(rank, world, None), Side(rank, world, strategy, {"mesh": mesh})
    for side in sides:
        trained(
            side,
            Chosen,
            lambda model, step, rank, _: loss_of(model, step, rank, path(rank, step)).backward(),
        )
    check_weights(sides[1].weights(), sides[0].weights(), "without ranks", 1e-5)
    model, optimizer = sharded(strategy, mesh)
    model.engine.microbatch(last=True)
    assert "(outer axis)" in _error_of_a_step(model, optimizer, rank, world, path)


def _one_leaves(rank: int, world: int) -> None:
    model, optimizer = sharded("optim_grads")
    if rank == 1:
        model.engine.launches.compare = Mock(side_effect=ValueError("before the comparison"))
    _step(model, optimizer, 0, rank, (0, 1, 2, 3))


def test_a_rank_that_does_not_come_to_the_comparison_is_reported() -> None:
    (first, told), (second, own) = settle_ranks(_one_leaves, 2)
    assert not first and not second and "before the comparison" in own, (told, own)
    waits = "rank 0 waits for the end of the step (step 1)"
    assert waits in told and "rank 1 has ended (" in told, told
