"""Process groups of experts that have another number of replicas than dense parameters.

Megatron makes the groups of all parameters for one number of optimizer instances. Groups for
another number of replicas of experts are made here, out of `expt_dp`: all ranks with the same
experts. They are split as Megatron splits them: neighbors hold the shards of one replica.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch.distributed as dist

from ...core.duplicate_groups import MemberRanks, duplicate_ranks
from ..options.table import EXPERT_INSTANCES

Group = dist.ProcessGroup


class ExpertGroups(NamedTuple):
    """The groups of experts."""

    # The ranks of one replica, which hold its shards.
    shard: Group
    # The same shard in every replica; None if there is one replica.
    outer: Group | None


_MADE: WeakKeyDictionary[Group, dict[MemberRanks, Group]] = WeakKeyDictionary()
"""All ranks with the same experts -> the groups that were made of some of them. The wrappers of
several model chunks share these."""


def expert_groups(
    everyone: Group | None, replicas: int, given: Sequence[Group | None]
) -> ExpertGroups:
    """The groups for so many replicas of experts: those of `given` that have the right ranks, and
    new ones. Collective over the default group.

    everyone: all ranks with the same experts. ValueError if it is None, or if `replicas` does not
    divide its ranks."""
    if everyone is None:
        raise ValueError(
            f"ddp_config.{EXPERT_INSTANCES}={replicas}: pg_collection has groups of experts, but "
            "not expt_dp, which is split over the replicas. Pass a ProcessGroupCollection that has "
            "it"
        )
    ranks = dist.get_process_group_ranks(everyone)
    if replicas < 1 or len(ranks) % replicas:
        raise ValueError(
            f"ddp_config.{EXPERT_INSTANCES}={replicas}: does not divide the {len(ranks)} ranks "
            f"{ranks} of expt_dp, which have the same experts. Use a divisor of their number"
        )
    size = len(ranks) // replicas
    own = dist.get_rank(everyone)
    first = own - own % size
    known = [everyone, *given]
    shard = _of_ranks(ranks[first : first + size], "expert_shards", everyone, known)
    outer = None
    if replicas > 1:
        outer = _of_ranks(ranks[own % size :: size], "expert_replicas", everyone, known)
    return ExpertGroups(shard, outer)


def _of_ranks(
    wanted: Sequence[int],
    name: str,
    everyone: Group,
    known: Sequence[Group | None],
) -> Group:
    """The group of `known` that has these ranks in this order, or one that is made once."""
    ranks = tuple(wanted)
    for group in known:
        if group is not None and tuple(dist.get_process_group_ranks(group)) == ranks:
            return group
    made = _MADE.setdefault(everyone, {})
    if ranks not in made:
        group = duplicate_ranks(ranks, name)
        assert group is not None  # this rank is among them
        made[ranks] = group
    return made[ranks]
