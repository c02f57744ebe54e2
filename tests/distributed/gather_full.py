"""Gathers whole values of sharded parameters, for comparison with an unsharded model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_fsdp_adapter.checkpoint.names import split_depth

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
    named: Named, local_of: Callable[[Any], torch.Tensor | None]
) -> dict[str, torch.Tensor]:
    """Name -> whole value, gathered from `local_of(pair)` of all ranks, without pairs for which it
    is None.

    Collective over data-parallel ranks. The pieces are exchanged in host memory, because a pickled
    device tensor would arrive on the sender's device."""
    by_groups: dict[tuple[Any, ...], dict[str, torch.Tensor]] = {}
    for name, pair in named:
        part = local_of(pair)
        if part is not None:
            by_groups.setdefault(shard_groups(pair.group), {})[name] = part.reshape(-1)
    found: dict[str, torch.Tensor] = {}
    # A stage may lack a domain, but all ranks of a domain's groups are in one stage.
    for groups, local in by_groups.items():
        mine = {name: value.cpu() for name, value in local.items()}
        for group in groups:
            pieces: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(pieces, mine, group=group)
            mine = {name: torch.cat([piece[name] for piece in pieces]) for name in mine}
        found |= {name: value.to(local[name].device) for name, value in mine.items()}
    return {name: found[name].view(pair.unsharded.shape) for name, pair in named if name in found}
