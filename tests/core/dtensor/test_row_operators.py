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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.utils import get_total_norm, parameters_to_vector, vector_to_parameters

from megatron_fsdp_adapter import fully_shard_model
from megatron_fsdp_adapter.core.dtensor.uneven import UnevenDTensor
from tests.lib.plain.plain import device
from tests.lib.ranks.shared_ranks import on_ranks

CHECKS = (
    "core/dtensor/operators.py",
    "core/dtensor/uneven.py",
    "core/dtensor/blocks.py",
)


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


def _mean(p, *_):
    return p.abs().mean()


def _deviation(p, *_):
    return p.std()


def _largest(p, *_):
    return p.max()


def _finite(p, *_):
    return p.isfinite().all()


def _sums_of_rows(p, *_):
    return p.sum(1)


def _norms_of_columns(p, *_):
    return p.norm(dim=0)


def _rows_of_norm_one(p, *_):
    return p / p.norm(dim=1, keepdim=True)


def _product(p, *_):
    return p.t() @ p


def _singular_values(p, *_):
    return torch.linalg.svdvals(p)


def _flat(p, *_):
    return p.view(-1)


def _a_row(p, *_):
    return p[1]


def _columns(p, *_):
    return p[:, 1:3] * 2


def _with_an_even_split(p, even, everywhere):
    return p * even(_counted(p))


def _with_the_whole(p, even, everywhere):
    return p + everywhere(_counted(p))


def _with_a_column(p, even, everywhere):
    return p * everywhere(_counted(p)[:, :1])


def _where(p, even, everywhere):
    return torch.where(p > 0, p, even(_counted(p)))


def _a_list(p, *_):
    return torch._foreach_mul([p, p * 2], 3)[1] + p


def _new(p, *_):
    return p.new_ones(p.shape) + p


def _times_a_sum(p, *_):
    return p.sum() * p + p * (p.sum() + p.abs().sum())


def _off_another(p, *_):
    other = p * p + 1
    return p - (p * other).sum() / (other * other).sum() * other


def _list_times_a_sum(p, *_):
    return torch._foreach_mul([p, p * 2], p.sum())[1]


def _list_times_sums(p, *_):
    return torch._foreach_mul([p, p * 2], [-p.sum(), p.sum() / 3])[1]


def _item(p, *_):
    return p * (p.sum().item() + (p.sum() / 2).view(1).item() + p.norm().item())


READ = {
    "times a sum": _times_a_sum,
    "off another": _off_another,
    "a list times a sum": _list_times_a_sum,
    "a list times sums": _list_times_sums,
    "item": _item,
    "mean": _mean,
    "deviation": _deviation,
    "largest": _largest,
    "finite": _finite,
    "sums of rows": _sums_of_rows,
    "norms of columns": _norms_of_columns,
    "rows of norm one": _rows_of_norm_one,
    "product": _product,
    "singular values": _singular_values,
    "flat": _flat,
    "a row": _a_row,
    "columns": _columns,
    "with an even split": _with_an_even_split,
    "with the whole": _with_the_whole,
    "with a column": _with_a_column,
    "where": _where,
    "a list": _a_list,
    "new": _new,
}
for order, foreach in itertools.product(NORMS, (None, True, False)):
    READ[f"norm of order {order}, {foreach=}"] = functools.partial(_norm, order, foreach)


def _centered(p, *_):
    return p.sub_(p.mean(0))


def _scaled_to_rows_of_norm_one(p, *_):
    return p.div_(p.norm(dim=1, keepdim=True))


def _copied_from_the_whole(p, even, everywhere):
    return p.copy_(everywhere(_counted(p)))


def _copied_from_an_even_split(p, even, everywhere):
    return p.copy_(even(_counted(p)))


def _list_written(p, even, everywhere):
    return torch._foreach_lerp_([p], [even(_counted(p))], 0.3)


def _an_even_split(p, even, everywhere):
    return p.copy_(even(_counted(p)).add_(p))


def _row_cleared(p, *_):
    return p[0].zero_()


def _columns_cleared(p, *_):
    return p[:, 1:3].zero_()


def _transposed(p, *_):
    view = p.t()
    p.mul_(2)
    view.add_(1)
    return view[1]


def _flat_doubled(p, *_):
    return p.detach().view(-1)[3:].mul_(2)


def _by_whole_tensors(p, *_):
    return p.addmm_(p, p.t() @ p, alpha=0.1)


def _a_product_added(p, *_):
    return p.mul_(p.sum()).add_(p.sum() * p, alpha=0.1)


def _list_by_a_sum(p, *_):
    return torch._foreach_mul_([p], p.sum())


def _by_a_vector(p, *_):
    vector_to_parameters(parameters_to_vector([p]) * 0.5, [p])


WRITTEN = {
    "a product added": _a_product_added,
    "a list by a sum": _list_by_a_sum,
    "by a vector": _by_a_vector,
    "centered": _centered,
    "rows of norm one": _scaled_to_rows_of_norm_one,
    "copied from the whole": _copied_from_the_whole,
    "copied from an even split": _copied_from_an_even_split,
    "a list": _list_written,
    "an even split": _an_even_split,
    "a row": _row_cleared,
    "columns": _columns_cleared,
    "transposed": _transposed,
    "flat": _flat_doubled,
    "by whole tensors": _by_whole_tensors,
}


@pytest.mark.parametrize("world", [2, 3])
@on_ranks()
def test_operators_give_and_write_what_they_do_of_whole_tensors(rank: int, world: int) -> None:
    made = fully_shard_model(nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 5), nn.Linear(5, 4)), None)
    if type(next(made.parameters()).detach() * 2) is not UnevenDTensor:
        return  # torch 2.11 asks no subclass
    matrices = [p for p in made.parameters() if p.dim() == 2]
    with torch.no_grad():
        for number, param in enumerate(matrices):
            generator = torch.Generator().manual_seed(number)
            begin = torch.randn(param.shape, generator=generator).to(device())
            distribute = functools.partial(distribute_tensor, device_mesh=param.device_mesh)
            even = functools.partial(distribute, placements=[Shard(0)])
            everywhere = functools.partial(distribute, placements=[Replicate()])
            for name, use in READ.items():
                param.copy_(everywhere(begin))
                whole = begin.clone()
                found = use(param, even, everywhere)
                expected = use(whole, torch.clone, torch.clone)
                close(param, whole, name, number)
                close(found, expected, name, number)
            for name, use in WRITTEN.items():
                param.copy_(everywhere(begin))
                whole = begin.clone()
                use(param, even, everywhere)
                use(whole, torch.clone, torch.clone)
                close(param, whole, name, number)
        empty = [param.to_local().numel() == 0 for param in made.parameters()]
        assert any(empty) or rank == 0, "every rank has rows of all parameters"


def test_weights_in_host_memory_that_report_a_device_have_a_detach(alone: None) -> None:
    """`state_dict` calls it. That of torch 2.11 wants one device; "meta" stands for a GPU here."""
    mesh = init_device_mesh("cpu", (1,))
    made = UnevenDTensor.over(torch.empty(4, 3, device="meta"), mesh, [Shard(0)], (4, 3), (3, 1))
    weight: Any = nn.Parameter(made)
    weight._local_tensor = torch.ones(4, 3)
    detached: Any = weight.detach()
    assert isinstance(detached, UnevenDTensor) and not detached.requires_grad
    assert detached._local_tensor.data_ptr() == weight._local_tensor.data_ptr()
