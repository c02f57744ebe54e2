"""Models of which ranks use different units, or the same ones in another order."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp_adapter import fully_shard_model, fully_shard_optimizer
from megatron_fsdp_adapter.core.distributed_index import FSDPDistributedIndex
from megatron_fsdp_adapter.core.topology import DENSE
from megatron_fsdp_adapter.plain.fully_shard import _index_over
from tests.lib.plain.late_gradients import Block, Chain, inputs

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
