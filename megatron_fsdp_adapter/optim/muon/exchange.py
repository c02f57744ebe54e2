"""The exchange of one stage: rows to owners, updates back, and the products in between.

    gather     rows 1 | rows 2 | rows 3 |          updates 1 | rows 4 | updates 2 | ...
    compute             momentum    | matrices 1 | matrices 2        | apply 1 | ...

Exchanges run on the gather role, which has nothing else to do in a step. Rows travel some stages
ahead (`plan.sent_before`), so that a rank whose matrices of a stage are fewer goes on with the next
one's.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ...core.comm.communicator import Communicator
from ...core.duplicate_groups import duplicate_ranks
from ...core.engine.buffer import copy_each
from ...core.engine.engine import FsdpEngine
from ...core.engine.group import ParamGroup
from ...core.layout.ranges import nested_shard_rank
from ...core.runtime.device import COMPUTE, GATHER, Runtime
from ...core.topology import DENSE, EXPERT
from .matrices import MatrixShape, Member, Run
from .plan import Runs, StagePlan

MAX_BATCH = 1 << 22
"""Elements of the matrices that are computed at once, if there is more than one. Larger ones fill a
device alone, and alone their bits do not depend on how many a rank owns."""

Key = tuple[int, int]
"""A matrix: the numbers of its parameter, and of itself in that."""

Cut = tuple[Run, torch.Tensor]
"""A run, and its elements: a view into a buffer."""

Orthogonalize = Callable[[torch.Tensor], torch.Tensor]
"""Orthogonalizes a batch of matrices, (batch, rows, columns)."""


Parties = Mapping[int, Member]
"""The global ranks of an exchange, in order, and what each holds."""


def parties_in(group: ParamGroup) -> Parties:
    """The ranks that together hold the parameters of `group`: those of the shard axis, of an outer
    axis that splits shards again, and of tensor parallelism. With replicas on an outer axis each
    replica computes by itself, as the network between them is the slow one."""
    domain = group.domain
    mesh = domain.mesh.mesh
    found = {}
    for place in itertools.product(*map(range, mesh.shape)):
        numbers = iter(place)  # (outer,) shard(, tensor-parallel)
        outer = next(numbers) if domain.outer is not None else 0
        shard = next(numbers)
        part = next(numbers, 0)
        if not group.shards.splits_axis:
            shard = 0
        if group.shards.splits_outer:
            shard = nested_shard_rank(shard, outer, domain.outer_size)
        elif domain.outer is not None and outer != domain.outer.rank:
            continue
        found[int(mesh[place])] = shard, part
    return dict(sorted(found.items()))  # as torch sorts the ranks of a group


RankGroups = Mapping[tuple[int, ...], dist.ProcessGroup]
"""Ranks -> their process group."""


DOMAINS = (DENSE, EXPERT)
"""Domains that have matrices. Domains of other names have the ranks of these."""


def wanted_groups(engines: Sequence[FsdpEngine]) -> dict[str, tuple[int, ...]]:
    """Domain -> the ranks of its parties, if they are others than the ranks of its shard axis."""
    wanted = {}
    for engine in engines:
        for group in engine.groups:
            domain = group.domain
            ranks = tuple(parties_in(group))
            if ranks != domain.axis.ranks and domain.name in DOMAINS:
                wanted[domain.name] = ranks
    return wanted


def exchange_groups(engines: Sequence[FsdpEngine]) -> RankGroups:
    """Makes the process groups of `wanted_groups`. Collective over the default group, also for
    ranks whose engines have no parameters of some domain."""
    wanted = wanted_groups(engines)
    made = {}
    for name in DOMAINS:
        ranks = wanted.get(name, ())
        group = duplicate_ranks(ranks, f"muon_{name}")
        if group is not None:
            made[ranks] = group
    return made


class StageExchange:
    """The buffers of one stage.

    Args:
        plan: this rank's part. communicator: over the ranks of the plan, in its order.
        dtype: of the rows that travel. result: of the updates that travel back.
    """

    def __init__(
        self,
        plan: StagePlan,
        communicator: Communicator,
        runtime: Runtime,
        dtype: torch.dtype,
        result: torch.dtype,
    ) -> None:
        self._plan = plan
        self._communicator = communicator
        self._runtime = runtime
        self._dtype = dtype
        self._result = result
        # The matrices that this rank owns, in batches of one shape that are computed at once.
        self._batches = list(_batches(plan, communicator.rank))
        # Whether each update goes back to the ranks that the rows came from, and to no others.
        self._returns_alike = plan.returned == plan.received
        # The exchange under way: its output, its source, and the event of its end.
        self._flight: Any = None

    @property
    def mean_bytes(self) -> int:
        """Mean bytes over all ranks of the rows that a rank sends and receives."""
        numel = sum(param.numel for param in self._plan.params)
        return 2 * numel * self._dtype.itemsize // self._communicator.size

    def send(self, rows: Sequence[torch.Tensor | None]) -> None:
        """Starts to send this rank's flat rows of each parameter; zeros where a parameter's are
        None."""
        plan = self._plan
        source = self._empty(plan.sent, self._dtype)
        targets = []
        pieces = []
        for run, target in _cut(source, plan.sent):
            own = rows[run.param]
            if own is None:
                target.zero_()
            else:
                targets.append(target)
                pieces.append(own[run.place])
        copy_each(targets, pieces)
        self._exchange(source, plan.sent, plan.received)

    def compute(self, orthogonalize: Orthogonalize) -> None:
        """Waits for the matrices that this rank owns, and starts to send their updates back."""
        plan = self._plan
        received = self._arrived()
        sources = _by_matrix(received, plan.received)
        updates = self._memory_of_updates(received)
        targets = _by_matrix(updates, plan.returned)
        for shape, keys in self._batches:
            batch = self._received_batch(shape, keys, sources)
            for key, matrix in zip(keys, orthogonalize(batch), strict=True):
                panels = self._panels_of(key, matrix)
                memory = []
                pieces = []
                for run, target in targets[key]:
                    memory.append(target)
                    pieces.append(panels[run.panel, run.place_in_panel])
                copy_each(memory, pieces)
        self._exchange(updates, plan.returned, plan.updates)

    def _memory_of_updates(self, received: torch.Tensor) -> torch.Tensor:
        """Memory to send updates from. If all updates go back where rows came from, it is that of
        the rows that were received: a matrix is read before its update is written."""
        if self._returns_alike and received.element_size() == self._result.itemsize:
            return received.view(self._result)
        return self._empty(self._plan.returned, self._result)

    def updates(self) -> Iterator[Cut]:
        """Waits for the updates of this rank's rows, and gives the values of each run."""
        return _cut(self._arrived(), self._plan.updates)

    def _received_batch(
        self, shape: MatrixShape, keys: Sequence[Key], sources: Mapping[Key, Sequence[Cut]]
    ) -> torch.Tensor:
        """The matrices of `keys`, put together from what has arrived of their panels."""
        batch = torch.empty((len(keys), *shape), dtype=self._dtype, device=self._runtime.device)
        targets = []
        pieces = []
        split = []
        for key, matrix in zip(keys, batch, strict=True):
            panels = self._panels(key)
            whole = matrix.view(1, -1)
            if panels > 1:
                whole = torch.empty_like(matrix).view(panels, -1)
                split.append((matrix, whole))
            for run, source in sources.get(key, ()):
                targets.append(whole[run.panel, run.place_in_panel])
                pieces.append(source)
        copy_each(targets, pieces)
        for matrix, whole in split:
            joined = whole.view(len(whole), shape[0], -1).transpose(0, 1)
            matrix.view(joined.shape).copy_(joined)
        return batch

    def _panels(self, key: Key) -> int:
        param, _ = key
        return self._plan.params[param].panels

    def _panels_of(self, key: Key, matrix: torch.Tensor) -> torch.Tensor:
        """The panels of a matrix, each of them flat."""
        panels = self._panels(key)
        split = matrix.reshape(matrix.shape[0], panels, -1).transpose(0, 1)
        return split.reshape(panels, -1)

    def _empty(self, runs: Runs, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(sum(_counts(runs)), dtype=dtype, device=self._runtime.device)

    def _exchange(self, source: torch.Tensor, sent: Runs, received: Runs) -> None:
        runtime = self._runtime
        output = self._empty(received, source.dtype)
        counts = _counts(received), _counts(sent)
        runtime.wait(GATHER, runtime.record(COMPUTE))
        runtime.launch(GATHER, lambda: self._communicator.all_to_all(output, source, *counts))
        # Kept until compute has waited: both were allocated on its stream.
        self._flight = output, source, runtime.record(GATHER)

    def _arrived(self) -> torch.Tensor:
        output, _, event = self._flight
        self._runtime.wait(COMPUTE, event)
        self._flight = None
        return output


def _batches(plan: StagePlan, owner: int) -> Iterator[tuple[MatrixShape, list[Key]]]:
    """The matrices that a rank owns, in batches that are computed at once: their shape and keys."""
    owned = defaultdict[MatrixShape, list[Key]](list)
    for number, (param, owners) in enumerate(zip(plan.params, plan.owners, strict=True)):
        for matrix, shape in enumerate(param.shapes):
            if owners[matrix] == owner:
                owned[shape].append((number, matrix))
    for shape, keys in owned.items():
        size = max(1, MAX_BATCH // math.prod(shape))
        for start in range(0, len(keys), size):
            yield shape, keys[start : start + size]


def _counts(runs: Runs) -> list[int]:
    return [sum(run.local.numel for run in of) for of in runs]


def _cut(flat: torch.Tensor, runs: Runs) -> Iterator[Cut]:
    """Each run, and its elements in a buffer that has all of them in order."""
    every = [run for of in runs for run in of]
    if not every:
        return iter(())
    sizes = [run.local.numel for run in every]
    return zip(every, flat.split(sizes), strict=True)


def _by_matrix(flat: torch.Tensor, runs: Runs) -> Mapping[Key, Sequence[Cut]]:
    """The runs of each matrix, and their elements in a buffer that has all of them in order."""
    found: dict[Key, list[Cut]] = {}
    for run, values in _cut(flat, runs):
        found.setdefault((run.param, run.matrix), []).append((run, values))
    return found
