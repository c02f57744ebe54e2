"""Plans the exchange of rows so that each matrix of a stage is whole on its owner, and of updates
back.

A *stage* is what is exchanged together: matrices of one unit, as many as `stages_of` allows. Every
rank works out its own part of each exchange from numbers that all of them have, and both sides of a
pair list the same runs in the same order, so that what is sent needs no labels.

The owner of a matrix, the rank that orthogonalizes it, is a pure function of the costs, equal on
every rank.
"""

from __future__ import annotations

import functools
import heapq
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

from .matrices import Member, MuonParam, Run

STAGE_NUMEL = 1 << 26
"""Elements of a stage, if it has more than one parameter."""
IN_FLIGHT = 512 << 20
"""Bytes of rows that a rank has sent and received ahead of what it computes, if that is more than
one stage. Every rank has the mean in its place: a rank may receive more, or less."""


def stages_of(numels: Sequence[int], limit: int = STAGE_NUMEL) -> list[slice]:
    """Slices of the parameters, of these elements, that are exchanged together: neighbors up to
    `limit`."""
    found, start, total = list[slice](), 0, 0
    for index, numel in enumerate(numels):
        if index > start and total + numel > limit:
            found.append(slice(start, index))
            start, total = index, 0
        total += numel
    return [*found, slice(start, len(numels))] if numels else []


def sent_before(sizes: Sequence[int], limit: int = IN_FLIGHT) -> tuple[int, ...]:
    """Number of stages whose rows are on their way before each stage is computed, itself among
    them, for stages of `sizes` bytes: as many as `limit` allows. The same on every rank, as
    exchanges are collective."""
    found, sent, total = [], 0, 0
    for number, size in enumerate(sizes):
        while sent < len(sizes) and (sent <= number or total + sizes[sent] <= limit):
            total += sizes[sent]
            sent += 1
        found.append(sent)
        total -= size
    return tuple(found)


Runs = tuple[tuple[Run, ...], ...]
"""Runs for each rank of the exchange."""


@dataclass(frozen=True)
class StagePlan:
    """This rank's part of a stage. sent: its rows that each owner gets; received: what each rank
    sends of the matrices that it owns; returned: of these, what each rank gets of their updates;
    updates: what it gets of each owner, for its own rows. Two of them differ from the other two
    where several ranks hold the same rows: one sends them, and all get their update."""

    params: tuple[MuonParam, ...]
    owners: tuple[tuple[int, ...], ...]
    sent: Runs
    received: Runs
    returned: Runs
    updates: Runs


def plan_stage(
    params: Sequence[MuonParam], owners: Sequence[Sequence[int]], members: tuple[Member, ...],
    me: int,
) -> StagePlan:  # fmt: skip
    """The part of rank number `me` of `members`. owners: of each parameter's matrices, by number
    in `members`. Takes as long as there are matrices, and ranks for those that `me` owns."""
    ranks = range(len(members))
    # Most ranks have none of it.
    found = tuple(defaultdict[int, list[Run]](list) for _ in range(4))
    sent, received, returned, updates = found
    for number, (param, of) in enumerate(zip(params, owners, strict=True)):
        sends = _sends(param.split is None, members)
        for matrix, owner in enumerate(of):
            mine = list(param.runs(number, matrix, members[me]))
            updates[owner] += mine
            sent[owner] += mine if sends(me, owner) else []
            for rank in ranks if owner == me else ():
                theirs = list(param.runs(number, matrix, members[rank]))
                returned[rank] += theirs
                received[rank] += theirs if sends(rank, me) else []
    return StagePlan(
        tuple(params), tuple(tuple(of) for of in owners),
        *(tuple(tuple(runs.get(rank, ())) for rank in ranks) for runs in found),
    )  # fmt: skip


@functools.lru_cache(maxsize=2)  # the same for all stages of the same ranks
def _sends(whole: bool, members: tuple[Member, ...]) -> Callable[[int, int], bool]:
    """A predicate of holder and owner: True if the holder sends the owner what several ranks hold:
    the owner itself if it is one of them, else one that the owner's number chooses. whole: tensor
    parallelism does not split it."""
    keys = [(shard, 0 if whole else part) for shard, part in members]
    holders = defaultdict[tuple[int, int], list[int]](list)
    for number, key in enumerate(keys):
        holders[key].append(number)

    def sends(holder: int, owner: int) -> bool:
        if keys[holder] == keys[owner]:
            return holder == owner
        alike = holders[keys[holder]]
        return alike[owner % len(alike)] == holder

    return sends


def assign(costs: Sequence[int], ranks: int) -> tuple[int, ...]:
    """The owner of each matrix: the most costly first, each to the rank with the least so far.

    Matrices of one cost keep their order, and each cost begins with another rank, so that those of
    one unit, and of neighboring ones, which are exchanged one after the other, lie on different
    ranks. No rank has more than the mean and one matrix.
    Parts of a cost that are smaller were rejected: a matrix that several ranks share costs as much
    on each of them, or an exchange in every step of the iteration.
    """
    load, owners = [0] * ranks, [0] * len(costs)
    ordered = sorted(range(len(costs)), key=lambda index: (-costs[index], index))
    for kind, (_, alike) in enumerate(groupby(ordered, key=costs.__getitem__)):
        heap = [(load[rank], 0, (rank + kind) % ranks, rank) for rank in range(ranks)]
        heapq.heapify(heap)
        for index in alike:
            least, count, place, rank = heapq.heappop(heap)
            owners[index], load[rank] = rank, least + costs[index]
            heapq.heappush(heap, (load[rank], count + 1, place, rank))
    return tuple(owners)
