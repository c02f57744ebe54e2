"""Ranks that use different units, or use them in another order."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from megatron_fsdp_adapter import fully_shard_model, fully_shard_optimizer
from megatron_fsdp_adapter.core.config import STRATEGIES
from megatron_fsdp_adapter.core.distributed_index import FSDPDistributedIndex
from megatron_fsdp_adapter.core.topology import DENSE
from megatron_fsdp_adapter.plain.fully_shard import _index_over
from tests.lib.gpt.checks import check_weights
from tests.lib.gpt.gpt import full_all
from tests.lib.plain.late_gradients import Block, Chain, inputs, trained
from tests.lib.plain.plain import Side
from tests.lib.ranks.groups import everyones
from tests.lib.ranks.launch import settle_ranks
from tests.lib.ranks.shared_ranks import on_ranks

STEPS = 4
LR = 0.05

Path = Sequence[int]
"""The blocks that a rank runs, in order; those with a minus sign (~number) for nothing."""


class Chosen(Chain):
    """Blocks of one size between two linear layers of the root's, of which each call runs those
    that are passed."""

    def forward(self, x: torch.Tensor, path: Path) -> torch.Tensor:  # type: ignore[override]
        x = self.first(x)
        for number in path:
            output = self.blocks[max(number, ~number)](x)
            x = output if number >= 0 else x
        return self.last(x)


LIKE: dict[str, Callable[[int, int], Path]] = {
    "as listed": lambda rank, step: (0, 1, 2, 3),
    "the other way round": lambda rank, step: (3, 2, 1, 0),
    "another one in each step": lambda rank, step: (0, 1 + step % 3),
    "one for nothing": lambda rank, step: (0, ~1, 2, 3),
    "one twice": lambda rank, step: (0, 1, 1, 2, 3),
}
"""What a rank runs in a step, by rank and step."""

UNLIKE: dict[str, Callable[[int, int], Path]] = {
    "another unit": lambda rank, step: (0, 2 if rank == 1 else 1, 3),
    "another order": lambda rank, step: (0, 2, 1, 3) if rank == 1 else (0, 1, 2, 3),
}

HANGS = {("another order", "optim_grads_params")}
"""Numbers of gathers that differ, as one rank gathers ahead what it does not use."""


def _fresh() -> Chosen:
    torch.manual_seed(3)
    return Chosen()


def loss_of(model: nn.Module, step: int, rank: int, path: Path) -> torch.Tensor:
    given = inputs(step, 0, rank).to(next(model.parameters()).device)
    return model(given, path).float().square().mean()


@functools.cache
def _gather_group() -> Any:
    return dist.new_group()


def _with_gather_group(*args: Any) -> FSDPDistributedIndex:
    """A communicator of their own for gathers, as Megatron's wrapper makes them. With one for both,
    a gather on one rank meets a reduction on the other, and that hangs."""
    index = _index_over(*args)
    index.domains = {DENSE: replace(index.domains[DENSE], gather_group=_gather_group())}
    return index


def sharded(strategy: str, mesh: Any = None, device: str = "cpu") -> tuple[Any, Any]:
    """Model and optimizer."""
    make = _index_over if mesh is not None else _with_gather_group
    with patch("megatron_fsdp_adapter.plain.fully_shard._index_over", make):
        model = fully_shard_model(
            _fresh().to(device), mesh, [Block], data_parallel_sharding_strategy=strategy
        )
    return model, fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=LR))


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
    assert "launched different collectives" in text and "times 0" in text, text
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
    model.engine.is_last_microbatch = True
    assert "(outer axis)" in _error_of_a_step(model, optimizer, rank, world, path)


def _one_leaves(rank: int, world: int) -> None:
    model, optimizer = sharded("optim_grads")
    if rank == 1:
        model.engine.launches.compare = Mock(side_effect=ValueError("before the comparison"))
    _step(model, optimizer, 0, rank, (0, 1, 2, 3))


def test_a_rank_that_does_not_come_to_the_comparison_is_reported() -> None:
    (first, told), (second, own) = settle_ranks(_one_leaves, 2)
    assert not first and not second and "before the comparison" in own, (told, own)
    compared = "rank 0: comparing what the ranks have launched in this step, between ranks [0, 1]"
    assert compared in told and "took another path through the model" in told, told
