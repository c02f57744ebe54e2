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
from collections.abc import Callable, Mapping, Sequence
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
    if not numels:
        return []
    found = []
    start = 0
    total = 0
    for index, numel in enumerate(numels):
        if index > start and total + numel > limit:
            found.append(slice(start, index))
            start = index
            total = 0
        total += numel
    found.append(slice(start, len(numels)))
    return found


def sent_before(sizes: Sequence[int], limit: int = IN_FLIGHT) -> tuple[int, ...]:
    """Number of stages whose rows are on their way before each stage is computed, itself among
    them, for stages of `sizes` bytes: as many as `limit` allows. The same on every rank, as
    exchanges are collective."""
    found = []
    sent = 0
    total = 0  # bytes of what is sent and not computed
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
    """This rank's part of a stage. `sent` and `received` differ from `updates` and `returned` where
    several ranks hold the same rows: one sends them, and all get their update."""

    params: tuple[MuonParam, ...]
    # Of each parameter's matrices.
    owners: tuple[tuple[int, ...], ...]
    # Of its own rows: those that each owner gets.
    sent: Runs
    # Of the matrices that it owns: what each rank sends.
    received: Runs
    # Of the same matrices: what each rank gets of their updates.
    returned: Runs
    # For its own rows: what it gets of each owner.
    updates: Runs


def plan_stage(
    params: Sequence[MuonParam],
    owners: Sequence[Sequence[int]],
    members: tuple[Member, ...],
    me: int,
) -> StagePlan:
    """The part of rank number `me` of `members`. owners: of each parameter's matrices, by number
    in `members`. Takes as long as there are matrices, and ranks for those that `me` owns."""
    sent = _no_runs()
    received = _no_runs()
    returned = _no_runs()
    updates = _no_runs()
    for number, (param, of) in enumerate(zip(params, owners, strict=True)):
        sends = _sends(param.split is None, members)
        for matrix, owner in enumerate(of):
            mine = list(param.runs(number, matrix, members[me]))
            updates[owner] += mine
            if sends(me, owner):
                sent[owner] += mine
            if owner != me:
                continue
            for rank, member in enumerate(members):
                theirs = list(param.runs(number, matrix, member))
                returned[rank] += theirs
                if sends(rank, me):
                    received[rank] += theirs
    ranks = len(members)
    return StagePlan(
        params=tuple(params),
        owners=tuple(map(tuple, owners)),
        sent=_of_ranks(sent, ranks),
        received=_of_ranks(received, ranks),
        returned=_of_ranks(returned, ranks),
        updates=_of_ranks(updates, ranks),
    )


def _no_runs() -> defaultdict[int, list[Run]]:
    """Runs by rank: most ranks will have none."""
    return defaultdict(list)


def _of_ranks(runs: Mapping[int, Sequence[Run]], ranks: int) -> Runs:
    return tuple(tuple(runs.get(rank, ())) for rank in range(ranks))


@functools.lru_cache(maxsize=2)  # the same for all stages of the same ranks
def _sends(whole: bool, members: tuple[Member, ...]) -> Callable[[int, int], bool]:
    """A predicate of holder and owner: True if the holder sends the owner what several ranks hold:
    the owner itself if it is one of them, else one that the owner's number chooses. whole: tensor
    parallelism does not split it."""
    held = [(shard, 0) for shard, _ in members] if whole else members
    holders = defaultdict[Member, list[int]](list)
    for number, rows in enumerate(held):
        holders[rows].append(number)

    def sends(holder: int, owner: int) -> bool:
        if held[holder] == held[owner]:
            return holder == owner
        alike = holders[held[holder]]
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
    load = [0] * ranks
    owners = [0] * len(costs)
    ordered = sorted(range(len(costs)), key=lambda index: (-costs[index], index))
    for kind, (cost, alike) in enumerate(groupby(ordered, key=costs.__getitem__)):
        # By load, number of matrices of this cost, and place after the rank that begins.
        heap = [(load[rank], 0, (rank + kind) % ranks, rank) for rank in range(ranks)]
        heapq.heapify(heap)
        for index in alike:
            least, count, place, rank = heapq.heappop(heap)
            owners[index] = rank
            load[rank] = least + cost
            heapq.heappush(heap, (load[rank], count + 1, place, rank))
    return tuple(owners)
