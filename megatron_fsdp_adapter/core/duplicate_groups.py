"""Second process groups with the ranks of existing ones.

Making a group is collective over the default group. Torch can make one among its members alone. But
the name of such a group has a number that each member counts by itself: its groups, or from torch
2.15 on the groups that it helped to make. Members with different counts wait for each other for
ever.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

MemberRanks = tuple[int, ...]


def duplicate_group(
    group: dist.ProcessGroup | None, name: str, options: Any = None
) -> dist.ProcessGroup | None:
    """A new group with the ranks of `group`, or None for None. Collective over the default group.

    options: of the backend. Raises ValueError if the ranks' groups overlap, or do not have all of
    their members (`everyones_groups`)."""
    mine: MemberRanks = ()
    if group is not None:
        mine = tuple(dist.get_process_group_ranks(group))
    return duplicate_ranks(mine, name, options)


def duplicate_ranks(mine: MemberRanks, name: str, options: Any = None) -> dist.ProcessGroup | None:
    """A new group of the ranks `mine`, or None for no ranks. Collective over the default group."""
    made = {}
    for ranks in everyones_groups(name, mine):
        made[ranks] = dist.new_group(list(ranks), pg_options=options, group_desc=name.upper())
    return made.get(tuple(sorted(mine)))


def everyones_groups(attribute: str, mine: MemberRanks) -> list[MemberRanks]:
    """The groups of all ranks, from each rank's own, `mine` (() without one). Collective.

    Ranks exchange digests: those with equal ones are in one group. Only if digests do not fit are
    lists of ranks exchanged, for the error: they take numbers with the square of the world.

    Raises:
        ValueError: a rank has a group that it is not in, or that another member does not have.
    """
    world = dist.get_world_size()
    digest = digest_of(mine)
    digests: list[str] = [""] * world
    dist.all_gather_object(digests, digest)
    found: dict[str, list[int]] = {}
    for rank, theirs in enumerate(digests):
        if theirs:
            found.setdefault(theirs, []).append(rank)
    fits: list[bool] = [True] * world
    is_whole = not mine or found[digest] == sorted(mine)
    dist.all_gather_object(fits, is_whole)
    if not all(fits):
        everyone: list[MemberRanks] = [()] * world
        dist.all_gather_object(everyone, mine)
        _check_members(attribute, everyone)
    return sorted(map(tuple, found.values()))


def digest_of(ranks: MemberRanks) -> str:
    """A text that is the same for the same ranks in any order; empty for none."""
    if not ranks:
        return ""
    return hashlib.sha256(repr(sorted(ranks)).encode()).hexdigest()


def _check_members(attribute: str, everyone: Sequence[MemberRanks]) -> None:
    """Raises ValueError if the ranks have different groups. everyone: by rank, the ranks of its
    group, () without one."""
    for rank, ranks in enumerate(everyone):
        if ranks and rank not in ranks:
            raise ValueError(f"{attribute}: rank {rank} has a group of ranks {list(ranks)}")
        for member in ranks:
            theirs = everyone[member]
            if theirs != ranks:
                raise ValueError(
                    f"{attribute}: rank {rank} has a group of ranks {list(ranks)}, but rank "
                    f"{member} one of {list(theirs)}. Pass groups that do not overlap, "
                    "on all of their members"
                )
