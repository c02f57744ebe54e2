"""Gathers whole values of sharded parameters, ours and those that stock DDP's distributed optimizer
splits, for comparison with an unsharded model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_fsdp_adapter.checkpoint.names import split_depth
from tests.distributed.groups import everyones

Named = Sequence[tuple[str, Any]]
"""(name, pair of unsharded and sharded parameter of the engine)."""


def plain_name(name: str) -> str:
    """A parameter's name without the prefixes of wrappers."""
    return split_depth(name)[1]


def shard_groups(group: Any) -> tuple[Any, ...]:
    """The process groups over which a parameter group is sharded, the finest split first."""
    groups = [group.domain.outer.group] if group.splits_outer else []
    if group.config.strategy.shard_main:
        groups.append(group.domain.axis.group)
    return tuple(groups)


def full_values(
    named: Named, local_of: Callable[[Any], torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Name -> whole value, gathered from `local_of(pair)` of all ranks.

    Collective over data-parallel ranks. The pieces are exchanged in host memory, because a pickled
    device tensor would arrive on the sender's device."""
    by_groups: dict[tuple[Any, ...], dict[str, torch.Tensor]] = {}
    for name, pair in named:
        mine = by_groups.setdefault(shard_groups(pair.group), {})
        mine[name] = local_of(pair).cpu().reshape(-1)
    found: dict[str, torch.Tensor] = {}
    # A stage may lack a domain, but all ranks of a domain's groups are in one stage.
    for groups, mine in by_groups.items():
        for group in groups:
            pieces = everyones(mine, group)
            mine = {name: torch.cat([piece[name] for piece in pieces]) for name in mine}
        found |= mine
    return {
        name: found[name].to(pair.sharded.device).view(pair.unsharded.shape)
        for name, pair in named
    }


# What stock DDP's distributed optimizer splits.


def optimizers_of(optimizer: Any) -> list[Any]:
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def main_piece(param: Any, rows: slice) -> torch.Tensor:
    """A float32 parameter is its own main weight."""
    main = getattr(param, "main_param", None)
    return param.detach().view(-1)[rows] if main is None else main


def pieces_of(optimizer: Any) -> Mapping[int, slice]:
    """By the id of a parameter, the range of it, flat, that this rank's optimizer steps."""
    pieces = {}
    for one in optimizers_of(optimizer):
        for param in getattr(one, "model_param_gbuf_map", ()):
            held = one._get_model_param_range_map(param)["param"]
            pieces[id(param)] = slice(held.start, held.end)
    return pieces


def put_together(
    named: Iterable[tuple[str, Any]], optimizer: Any,
    piece_of: Callable[[Any, slice], torch.Tensor],
) -> dict[str, torch.Tensor]:  # fmt: skip
    """What is split over the data-parallel ranks of an instance, whole and float32, of every
    trained parameter: `piece_of` gives this rank's piece, a range of the flat parameter;
    collective."""
    pieces, found = pieces_of(optimizer), {}
    for name, param in named:
        if not param.requires_grad:
            continue
        whole = torch.zeros(param.numel(), device=param.device)
        rows = pieces.get(id(param))
        if rows is not None:
            whole[rows] = piece_of(param, rows).detach().view(-1).float()
        group = (
            parallel_state.get_data_parallel_group(
                with_context_parallel=True, partial_data_parallel=True
            )
            if getattr(param, "allreduce", True)
            else parallel_state.get_expert_data_parallel_group(partial_expert_data_parallel=True)
        )
        dist.all_reduce(whole, group=group)
        found[name] = whole.view(param.shape)
    return found
