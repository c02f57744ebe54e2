"""Assigns each matrix to the rank that orthogonalizes it: a pure function of the costs, equal on
every rank."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import groupby


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
