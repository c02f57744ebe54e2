"""Operators of torch give of sharded parameters, and write to them, what they give of
whole tensors, also where a rank has no rows of one."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.utils import get_total_norm

from megatron_fsdp_adapter import fully_shard_model
from megatron_fsdp_adapter.core.dtensor.uneven import UnevenDTensor
from tests.lib.plain.plain import device
from tests.lib.ranks.shared_ranks import on_ranks

CHECKS = ("core/dtensor/operators.py", "core/dtensor/uneven.py")


def close(found: torch.Tensor, expected: torch.Tensor, *label: object) -> None:
    whole = found.full_tensor() if hasattr(found, "full_tensor") else found
    torch.testing.assert_close(whole, expected, msg=lambda text: f"{label}: {text}")


Whole = Callable[[torch.Tensor], Any]
"""Makes what is of the same kind as a parameter of a tensor: a DTensor on the sharded side."""


def _counted(p: Any) -> torch.Tensor:
    return torch.arange(p.numel(), dtype=p.dtype, device=p.device).view(p.shape) / 7


def _norm(order: float, foreach: bool | None, p: Any, *unused: Whole) -> torch.Tensor:
    """Of a tensor, or of two, by torch's function."""
    if foreach is None:
        return p.norm(order)
    return get_total_norm([p, p * 2], order, foreach=foreach)


NORMS = (2.0, 3.5, 0.0, -1.0, float("inf"), -float("inf"))
"""Orders; torch knows no norm of an empty tensor for the last three."""

READ: dict[str, Callable[[Any, Whole, Whole], Any]] = {
    "mean": lambda p, even, everywhere: p.abs().mean(),
    "deviation": lambda p, even, everywhere: p.std(),
    "largest": lambda p, even, everywhere: p.max(),
    "finite": lambda p, even, everywhere: p.isfinite().all(),
    "sums of rows": lambda p, even, everywhere: p.sum(1),
    "norms of columns": lambda p, even, everywhere: p.norm(dim=0),
    "rows of norm one": lambda p, even, everywhere: p / p.norm(dim=1, keepdim=True),
    "product": lambda p, even, everywhere: p.t() @ p,
    "singular values": lambda p, even, everywhere: torch.linalg.svdvals(p),
    "flat": lambda p, even, everywhere: p.view(-1),
    "a row": lambda p, even, everywhere: p[1],
    "columns": lambda p, even, everywhere: p[:, 1:3] * 2,
    "with an even split": lambda p, even, everywhere: p * even(_counted(p)),
    "with the whole": lambda p, even, everywhere: p + everywhere(_counted(p)),
    "with a column": lambda p, even, everywhere: p * everywhere(_counted(p)[:, :1]),
    "where": lambda p, even, everywhere: torch.where(p > 0, p, even(_counted(p))),
    "a list": lambda p, even, everywhere: torch._foreach_mul([p, p * 2], 3)[1] + p,
    "new": lambda p, even, everywhere: p.new_ones(p.shape) + p,
    **{
        f"norm of order {order}, {foreach=}": functools.partial(_norm, order, foreach)
        for order, foreach in itertools.product(NORMS, (None, True, False))
    },
}


WRITTEN: dict[str, Callable[[Any, Whole, Whole], Any]] = {
    "centered": lambda p, even, everywhere: p.sub_(p.mean(0)),
    "rows of norm one": lambda p, even, everywhere: p.div_(p.norm(dim=1, keepdim=True)),
    "copied from the whole": lambda p, even, everywhere: p.copy_(everywhere(_counted(p))),
    "copied from an even split": lambda p, even, everywhere: p.copy_(even(_counted(p))),
    "a list": lambda p, even, everywhere: torch._foreach_lerp_([p], [even(_counted(p))], 0.3),
    "an even split": lambda p, even, everywhere: p.copy_(even(_counted(p)).add_(p)),
    "a row": lambda p, even, everywhere: p[0].zero_(),
    "columns": lambda p, even, everywhere: p[:, 1:3].zero_(),
    "transposed": lambda p, even, everywhere: (view := p.t(), p.mul_(2), view.add_(1), view[1]),
    "flat": lambda p, even, everywhere: p.detach().view(-1)[3:].mul_(2),
    "by whole tensors": lambda p, even, everywhere: p.addmm_(p, p.t() @ p, alpha=0.1),
}


@pytest.mark.parametrize("world", [2, 3])
@on_ranks()
def test_operators_give_and_write_what_they_do_of_whole_tensors(rank: int, world: int) -> None:
    made = fully_shard_model(nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 5), nn.Linear(5, 4)), None)
    if type(next(made.parameters()).detach() * 2) is not UnevenDTensor:
        return  # torch 2.11 asks no subclass
    with torch.no_grad():
        for number, param in enumerate(p for p in made.parameters() if p.dim() == 2):
            generator = torch.Generator().manual_seed(number)
            begin = torch.randn(param.shape, generator=generator).to(device())
            even, everywhere = (
                functools.partial(
                    distribute_tensor, device_mesh=param.device_mesh, placements=[form]
                )
                for form in (Shard(0), Replicate())
            )
            for names, writes in ((READ, False), (WRITTEN, True)):
                for name, use in names.items():
                    param.copy_(everywhere(begin))
                    whole = begin.clone()
                    found = use(param, even, everywhere)
                    expected = use(whole, torch.clone, torch.clone)
                    close(param, whole, name, number)
                    if not writes:
                        close(found, expected, name, number)
        empty = [param.to_local().numel() == 0 for param in made.parameters()]
        assert any(empty) or rank == 0, "every rank has rows of all parameters"
