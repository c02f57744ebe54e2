"""torch's own norms of sharded parameters and gradients are those of the whole tensors, also where
a rank has no rows of one."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, get_total_norm

from megatron_fsdp_adapter import fully_shard_model
from megatron_fsdp_adapter.core.config import STRATEGIES
from megatron_fsdp_adapter.dtensor import UnevenDTensor
from tests.distributed.plain import device
from tests.distributed.shared_ranks import on_ranks

ORDERS = (1.0, 2.0, 3.5, 0.0)
OF_NOTHING_REFUSED = (-1.0, float("inf"), -float("inf"))
"""Orders for which torch knows no norm of an empty tensor."""


class Small(nn.Module):
    """Parameters of fewer rows than there are ranks, or of none on most of them."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(5, 1)
        self.two = nn.Linear(2, 2)
        self.scale = nn.Parameter(torch.randn(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.one(x) + self.two(x[:, :2])).tanh().sum() * self.scale


def _small() -> Small:
    torch.manual_seed(4)
    return Small().to(device())


def _batch(rank: int) -> torch.Tensor:
    return torch.randn(3, 5, generator=torch.Generator().manual_seed(rank)).to(device())


def close(found: torch.Tensor, expected: torch.Tensor, *label: object) -> None:
    whole = found.full_tensor() if hasattr(found, "full_tensor") else found
    torch.testing.assert_close(whole, expected, msg=lambda text: f"{label}: {text}")


@pytest.mark.parametrize("world", [2, 3])
@on_ranks()
def test_torchs_norms_and_clipping_are_those_of_whole_tensors(rank: int, world: int) -> None:
    """Gradients are clipped again and again, one order after the other."""
    for strategy, row in STRATEGIES.items():
        plain = _small()
        sharded = fully_shard_model(_small(), None, data_parallel_sharding_strategy=strategy)
        for other in range(world):
            (plain(_batch(other)) / world).backward()
        sharded(_batch(rank)).backward()
        known, found = list(plain.parameters()), list(sharded.parameters())
        if row.shard_main:
            empty = sum(param.to_local().numel() == 0 for param in found)
            assert empty or rank == 0, "every rank has rows of all parameters"
        asked = type(found[0].detach() * 2) is UnevenDTensor  # torch 2.11 asks no subclass
        for order in (*ORDERS, *OF_NOTHING_REFUSED) if asked else ORDERS:
            for one, whole in zip(found, known, strict=True):
                close(one.norm(order), whole.detach().norm(order), strategy, order)
            for foreach in (True, False):
                for which in (lambda p: p, lambda p: p.grad):
                    close(
                        get_total_norm([which(p) for p in found], order, foreach=foreach),
                        get_total_norm([which(p).detach() for p in known], order, foreach=foreach),
                        strategy, order, foreach,
                    )
                if order != 0:  # counts elements: there is nothing to scale
                    bound = 0.7 * float(get_total_norm([p.grad for p in known], order))
                    norms = [clip_grad_norm_(p, bound, order, foreach=foreach)
                             for p in (found, known)]
                    close(*norms, strategy, order, foreach)
        for one, whole in zip(found, known, strict=True):
            close(one.grad, whole.grad.view(one.shape), strategy)
