"""Whole values of what ours has sharded, for comparison with a model that shards nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

Named = Sequence[tuple[str, Any]]
"""Names and the engine's pairs of unsharded and sharded parameter."""


def plain_name(name: str) -> str:
    """A parameter's name without the wrappers' levels."""
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name


def shard_groups(group: Any) -> tuple[Any, ...]:
    """The process groups that share a parameter group out, from the finest split on."""
    groups = [group.domain.outer.group] if group.splits_outer else []
    if group.config.strategy.shard_main:
        groups.append(group.domain.axis.group)
    return tuple(groups)


def full_values(
    named: Named, local_of: Callable[[Any], torch.Tensor | None]
) -> dict[str, torch.Tensor]:
    """By name, in the unsharded parameter's shape, what `local_of` gives of this rank's part of
    each
    pair; without those of which it gives None. Collective over data-parallel ranks; the pieces go
    through host memory: a tensor of another rank's device would arrive on that device."""
    by_groups: dict[tuple[Any, ...], dict[str, torch.Tensor]] = {}
    for name, pair in named:
        part = local_of(pair)
        if part is not None:
            by_groups.setdefault(shard_groups(pair.group), {})[name] = part.reshape(-1)
    found: dict[str, torch.Tensor] = {}
    # A stage may lack a domain, but all ranks of the domain's groups are of one stage.
    for groups, local in by_groups.items():
        mine = {name: value.cpu() for name, value in local.items()}
        for group in groups:
            pieces: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(pieces, mine, group=group)
            mine = {name: torch.cat([piece[name] for piece in pieces]) for name in mine}
        found |= {name: value.to(local[name].device) for name, value in mine.items()}
    return {name: found[name].view(pair.unsharded.shape) for name, pair in named if name in found}
