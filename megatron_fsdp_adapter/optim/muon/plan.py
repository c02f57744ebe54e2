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
"""Bytes of rows that are exchanged ahead of what is computed, if that is more than one stage. Every
rank counts the mean over ranks, so that all decide alike: a rank may have more, or less."""


def stages_of(numels: Sequence[int], limit: int = STAGE_NUMEL) -> list[slice]:
    """Slices of the parameters that are exchanged together: neighbors with at most `limit` elements
    in all, or one parameter. numels: elements of each parameter."""
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
    """For each stage, the number of stages whose rows are sent before it is computed: it is among
    them, and as many as `limit` bytes allow. The same on every rank, as exchanges are collective.

    sizes: bytes of each stage."""
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
    """The part of rank number `me` of `members`.

    owners: the number in `members` of each parameter's matrices' owners. The time grows with the
    matrices, and with ranks times the matrices that `me` owns."""
    sent = _no_runs()
    received = _no_runs()
    returned = _no_runs()
    updates = _no_runs()
    for number, (param, param_owners) in enumerate(zip(params, owners, strict=True)):
        sends = _sends(param.split is None, members)
        for matrix, owner in enumerate(param_owners):
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
    """A predicate of a holder and an owner: True if this holder sends its rows to the owner. Of
    several ranks that hold the same rows one sends them: the owner if it is among them, else one
    that is chosen by the owner's number.

    whole: tensor parallelism does not split the parameter."""
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

    Matrices of one cost keep their order, and each cost begins with another rank. So matrices of a
    unit and of its neighbors, which are exchanged one after the other, are on different ranks. No
    rank has more than the mean and one matrix.

    To split a matrix among ranks was rejected: it costs as much on each of them, or an exchange in
    every step of the iteration.
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
