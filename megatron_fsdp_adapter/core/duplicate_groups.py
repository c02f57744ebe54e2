"""Second process groups with the ranks of existing ones.

Making a group is collective over the default group. torch can make one among its members alone, but
its name has a number that each member counts by itself (the groups that it is in, or from torch
2.15 on those that it helped to make): members with different counts wait for each other forever.
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
    """A new group with the ranks of `group`, or None for None; collective over the default group.
    `options` are those of the backend. ValueError as for `create_all_gather_groups`."""
    mine: MemberRanks = ()
    if group is not None:
        mine = tuple(dist.get_process_group_ranks(group))
    return duplicate_ranks(mine, name, options)


def duplicate_ranks(mine: MemberRanks, name: str, options: Any = None) -> dist.ProcessGroup | None:
    """A new group of the ranks `mine`, or None for no ranks; collective over the default group."""
    made = {}
    for ranks in everyones_groups(name, mine):
        made[ranks] = dist.new_group(list(ranks), pg_options=options, group_desc=name.upper())
    return made.get(tuple(sorted(mine)))


def everyones_groups(attribute: str, mine: MemberRanks) -> list[MemberRanks]:
    """The groups of all ranks, from each rank's own, `mine` (() without one); collective.

    Ranks exchange digests: those with equal ones are in one group. Lists of ranks, on every rank as
    many numbers as the square of the world, are exchanged for the error, if digests do not fit.
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
    """`everyone[r]` are the ranks of rank r's group, () without one."""
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
