"""Core's groups of ranks, made once in a process for each choice of sizes: a process that runs many
tests needs a dozen choices, and communicators are kept until it ends."""

from __future__ import annotations

import functools
import gc
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state


def _state() -> dict[str, Any]:
    """Core keeps its groups in module variables named _LIKE_THIS."""
    found = vars(parallel_state).items()
    return {name: value for name, value in found if name[0] == "_" and name.isupper()}


NO_GROUPS = _state()


def forget_groups() -> None:
    """Sets core's variables to what they are before any group is made."""
    vars(parallel_state).update(NO_GROUPS)


def use_groups(**sizes: Any) -> None:
    """Sets core's variables to the groups of `sizes`, arguments of `initialize_model_parallel`;
    collective."""
    made = _made_in(dist.group.WORLD)
    chosen = tuple(sorted(sizes.items()))
    if chosen not in made:
        forget_groups()
        parallel_state.initialize_model_parallel(**sizes)
        made[chosen] = _state()
    vars(parallel_state).update(made[chosen])


@functools.lru_cache(maxsize=1)
def _made_in(world: Any) -> dict[tuple[tuple[str, Any], ...], dict[str, Any]]:
    """By sizes, of the present default group alone: each gloo group that is referred to keeps
    threads, which use a processor also when its default group has ended."""
    return {}


def everyones(value: Any, group: Any = None) -> list[Any]:
    """The value of each rank of the group; collective."""
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return found


def destroy_groups() -> None:
    """Ends all groups but the default one. Each holds threads and sockets: hundreds of them, left
    over from split after split, bring a machine to a stop."""
    _made_in.cache_clear()
    forget_groups()
    gc.collect()
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD and group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)
