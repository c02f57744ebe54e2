"""The exchange of one stage: rows to owners, updates back, and the products in between.

    gather     rows 1 | rows 2 | rows 3 |          updates 1 | rows 4 | updates 2 | ...
    compute             momentum    | matrices 1 | matrices 2        | apply 1 | ...

Exchanges run on the gather role, which has nothing else to do in a step. Rows travel some stages
ahead (`plan.sent_before`), so that a rank whose matrices of a stage are fewer goes on with the next
one's.
"""

from __future__ import annotations

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
from .matrices import Member, Run
from .plan import Runs, StagePlan

MAX_BATCH = 1 << 22
"""Elements of the matrices that are computed at once, if there is more than one. Larger ones fill a
device alone, and alone their bits do not depend on how many a rank owns."""

Sources = dict[tuple[int, int], list[tuple[Run, torch.Tensor]]]
"""Parameter and matrix -> what has arrived of it."""

Orthogonalize = Callable[[torch.Tensor], torch.Tensor]
"""Orthogonalizes a batch of matrices, (batch, rows, columns)."""


Parties = Mapping[int, Member]
"""The global ranks of an exchange, in order, and what each holds."""


def parties_in(group: ParamGroup) -> Parties:
    """The ranks that have some of the parameters of `group` between them: those of the shard axis,
    of an outer axis that splits shards again, and of tensor parallelism. Replicas of shards on an
    outer axis compute their own: its network is the slow one."""
    domain = group.domain
    mesh, found = domain.mesh.mesh, {}
    for place in torch.cartesian_prod(*(torch.arange(n) for n in mesh.shape)).view(-1, mesh.dim()):
        outer, shard, part = (*([0] if domain.outer is None else ()), *place.tolist(), 0)[:3]
        if domain.outer is not None and not group.splits_outer and outer != domain.outer.rank:
            continue
        shard = shard if group.shards_main else 0
        if group.splits_outer:
            shard = nested_shard_rank(shard, outer, domain.outer_size)
        found[int(mesh[tuple(place.tolist())])] = shard, part
    return dict(sorted(found.items()))  # as torch sorts the ranks of a group


Groups = Mapping[tuple[int, ...], dist.ProcessGroup]
"""Ranks -> their process group."""


DOMAINS = (DENSE, EXPERT)
"""Domains that have matrices. Domains of other names have the ranks of these."""


def wanted_groups(engines: Sequence[FsdpEngine]) -> dict[str, tuple[int, ...]]:
    """Domain -> the parties that are not all ranks of the shards and no others."""
    wanted = {}
    for engine in engines:
        for group in engine.groups:
            ranks = tuple(parties_in(group))
            if ranks != group.domain.axis.ranks and group.domain.name in DOMAINS:
                wanted[group.domain.name] = ranks
    return wanted


def exchange_groups(engines: Sequence[FsdpEngine]) -> Groups:
    """Makes the groups that parties need beside the groups of their shards; collective over the
    default group, also for ranks whose engines have no parameters of some domain."""
    wanted, made = wanted_groups(engines), {}
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
        self, plan: StagePlan, communicator: Communicator, runtime: Runtime, dtype: torch.dtype,
        result: torch.dtype,
    ) -> None:  # fmt: skip
        self._plan, self._communicator, self._runtime = plan, communicator, runtime
        self._dtype, self._result = dtype, result
        me = communicator.rank
        owned: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for number, (param, of) in enumerate(zip(plan.params, plan.owners, strict=True)):
            for matrix, owner in enumerate(of):
                if owner == me:
                    owned.setdefault(param.shapes[matrix], []).append((number, matrix))
        self._batches = [
            (shape, keys[start : start + _batch_size(shape)])
            for shape, keys in owned.items()
            for start in range(0, len(keys), _batch_size(shape))
        ]
        self._returns_alike = plan.returned == plan.received
        self._flight: Any = None

    @property
    def mean_bytes(self) -> int:
        """Mean bytes over all ranks of the rows that a rank sends and receives."""
        numel = sum(rows * columns for param in self._plan.params for rows, columns in param.shapes)
        return 2 * numel * self._dtype.itemsize // self._communicator.size

    def send(self, rows: Sequence[torch.Tensor | None]) -> None:
        """Starts to send this rank's flat rows of each parameter; zeros where there are none."""
        source = self._empty(self._plan.sent, self._dtype)
        targets, pieces = [], []
        for run, target in _cut(source, self._plan.sent):
            own = rows[run.param]
            if own is None:
                target.zero_()
            else:
                targets.append(target)
                pieces.append(own[run.local.start : run.local.stop])
        copy_each(targets, pieces)
        self._exchange(source, self._plan.sent, self._plan.received)

    def compute(self, orthogonalize: Orthogonalize) -> None:
        """Waits for the matrices that this rank owns, and starts to send their updates back."""
        received = self._arrived()
        sources: Sources = {}
        for run, source in _cut(received, self._plan.received):
            sources.setdefault((run.param, run.matrix), []).append((run, source))
        updates = self._memory_of_updates(received)
        targets: Sources = {}
        for run, target in _cut(updates, self._plan.returned):
            targets.setdefault((run.param, run.matrix), []).append((run, target))
        for shape, keys in self._batches:
            found = orthogonalize(self._received_batch(shape, keys, sources))
            for key, panels in self._panels_of(found, keys):
                copy_each(
                    [target for _, target in targets[key]],
                    [panels[at.panel][at.at : at.at + at.local.numel] for at, _ in targets[key]],
                )
        self._exchange(updates, self._plan.returned, self._plan.updates)

    def _memory_of_updates(self, received: torch.Tensor) -> torch.Tensor:
        """Memory to send updates from: where each matrix came from, which is read before its update
        is there, if they go back to the ranks that sent it and to no others."""
        if self._returns_alike and received.element_size() == self._result.itemsize:
            return received.view(self._result)
        return self._empty(self._plan.returned, self._result)

    def updates(self) -> Iterator[tuple[int, int, slice, torch.Tensor]]:
        """Waits for the updates of this rank's rows: parameter, matrix, place in the flat rows, and
        values."""
        for run, values in _cut(self._arrived(), self._plan.updates):
            yield run.param, run.matrix, slice(run.local.start, run.local.stop), values

    def _received_batch(
        self, shape: tuple[int, int], keys: Sequence[tuple[int, int]], sources: Sources
    ) -> torch.Tensor:
        batch = torch.empty(
            (len(keys), *shape), dtype=self._dtype, device=self._runtime.device
        )
        targets, pieces, split = [], [], []
        for number, key in enumerate(keys):
            panels = self._plan.params[key[0]].panels
            whole = batch[number].view(1, -1)
            if panels > 1:
                whole = torch.empty_like(batch[number]).view(panels, -1)
                split.append((number, whole))
            for run, source in sources.get(key, ()):
                targets.append(whole[run.panel, run.at : run.at + source.numel()])
                pieces.append(source)
        copy_each(targets, pieces)
        for number, whole in split:
            joined = whole.view(len(whole), shape[0], -1).transpose(0, 1)
            batch[number].view(joined.shape).copy_(joined)
        return batch

    def _panels_of(
        self, batch: torch.Tensor, keys: Sequence[tuple[int, int]]
    ) -> Iterator[tuple[tuple[int, int], torch.Tensor]]:
        """The panels of each matrix, flat."""
        for key, matrix in zip(keys, batch, strict=True):
            panels = self._plan.params[key[0]].panels
            split = matrix.reshape(matrix.shape[0], panels, -1).transpose(0, 1)
            yield key, split.reshape(panels, -1)

    def _empty(self, runs: Runs, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(sum(_counts(runs)), dtype=dtype, device=self._runtime.device)

    def _exchange(self, source: torch.Tensor, sent: Runs, received: Runs) -> None:
        output = self._empty(received, source.dtype)
        counts = _counts(received), _counts(sent)
        self._runtime.wait(GATHER, self._runtime.record(COMPUTE))
        self._runtime.launch(
            GATHER, lambda: self._communicator.all_to_all(output, source, *counts)
        )
        # Kept until compute has waited: both were allocated on its stream.
        self._flight = output, source, self._runtime.record(GATHER)

    def _arrived(self) -> torch.Tensor:
        output, _, event = self._flight
        self._runtime.wait(COMPUTE, event)
        self._flight = None
        return output


def _batch_size(shape: tuple[int, int]) -> int:
    return max(1, MAX_BATCH // (shape[0] * shape[1]))


def _counts(runs: Runs) -> list[int]:
    return [sum(run.local.numel for run in of) for of in runs]


def _cut(flat: torch.Tensor, runs: Runs) -> Iterator[tuple[Run, torch.Tensor]]:
    """Each run, and its elements in a buffer that has all of them in order."""
    every = [run for of in runs for run in of]
    return zip(every, flat.split([run.local.numel for run in every]) if every else (), strict=True)
