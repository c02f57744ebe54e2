"""The step of Muon on shards, in one optimizer with the inner one.

Two optimizers in core's chain were rejected: the norm, the count of zeros and the names in a
checkpoint would each be put together from two. So was momentum on the owners, with gradients that
travel as soon as they are reduced: they are clipped by a norm that is known last, and momentum
would need a layout of its own in checkpoints.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ...core.comm.communicator import Communicator
from ...core.engine.engine import FsdpEngine
from ...core.engine.group import ParamGroup
from ...core.engine.params import ParamPair
from ...core.topology import TP_DIM, ShardDomain
from ..local_shards import LocalShards, UpdateRule
from ..state import GroupOptions
from . import newton_schulz
from .exchange import Parties, RankGroups, StageExchange, parties_in
from .matrices import MuonParam
from .plan import assign, plan_stage, sent_before, stages_of

MOMENTUM = "momentum_buffer"
"""The name of Muon's state, as torch.optim.Muon has it."""


@dataclass(frozen=True)
class MuonOptions:
    """The options of a parameter group's update; lr and weight decay are the group's own."""

    # m <- momentum m + (1 - momentum) g
    momentum: float
    # Whether the same sum of the new m and g is orthogonalized, and not m.
    nesterov: bool
    # Of each Newton-Schulz step.
    coefficients: tuple[newton_schulz.Coefficients, ...]
    eps: float
    # The factor on a matrix's update, by its numbers of rows and columns.
    scale: Callable[[int, int], float]
    # The dtype of products, and of rows that are sent.
    dtype: torch.dtype = torch.bfloat16


Chosen = Callable[[GroupOptions], MuonOptions | None]
"""Chooses the options of a parameter group, None if it is not Muon's."""
Heights = Callable[[ParamPair], tuple[int, ...]]
"""Chooses the heights of the parts that a parameter is made of (`MuonParam.heights`)."""


class MuonEntry(NamedTuple):
    """A parameter, the number of its parameter group, and its local tensor, which is the key of its
    state."""

    group: int
    local: torch.Tensor
    param: MuonParam


Stage = tuple[list[MuonEntry], StageExchange]
"""Parameters that are exchanged together, and their exchange."""
Where = Mapping[int, tuple[int, torch.Tensor]]
"""Id of a parameter that Muon updates -> the number of its group, and its local tensor."""


def tensor_split(pair: ParamPair) -> tuple[int | None, int]:
    """The dim of a parameter that tensor parallelism splits, None if it splits none; and the number
    of tensor-parallel ranks."""
    mesh = pair.group.domain.mesh
    names = mesh.mesh_dim_names
    parts = mesh.size(-1) if names and names[-1] == TP_DIM else 1
    split = pair.managed.split if parts > 1 else None
    return split, parts


def muon(
    engines: Sequence[FsdpEngine], exchange: RankGroups, chosen: Chosen, heights: Heights
) -> UpdateRule:
    """The rule of Muon.

    engines: those of the parameters. exchange: the process groups that `exchange_groups` has made
    for them.
    """
    return UpdateRule(
        lambda group: () if chosen(group) is None else (MOMENTUM,),
        Muon(engines, exchange, chosen, heights).update,
    )


class Muon:
    """The planned exchanges of Muon, and its update. See `muon`."""

    def __init__(
        self, engines: Sequence[FsdpEngine], exchange: RankGroups, chosen: Chosen, heights: Heights
    ) -> None:
        self._engines = engines
        self._runtime = engines[0].runtime
        self._groups = exchange
        self._chosen = chosen
        self._heights = heights
        # By ranks of the parties; made when they are needed.
        self._communicators: dict[tuple[int, ...], Communicator] = {}
        # `LocalShards.pairs` for which the stages were planned; they are others after a change.
        self._pairs: Any = None
        self._stages: list[Stage] = []
        # For each stage, the number of those whose rows are sent before it is computed.
        self._sent_before: tuple[int, ...] = ()

    # Planning.

    def _plan(self, shards: LocalShards, groups: Sequence[GroupOptions]) -> None:
        """Plans the stages: once, and again when groups have other parameters. The latter is the
        case on all ranks or on none, as the same groups are on all."""
        if self._pairs is shards.pairs:
            return
        self._pairs = shards.pairs
        where = {}
        for number, group in enumerate(groups):
            if self._chosen(group) is not None:
                for param, local in shards.pairs[number]:
                    where[id(param)] = number, local
        parts = [part for engine in self._engines for part in self._parts_of(engine, where)]
        costs = defaultdict[tuple[int, ...], list[int]](list)  # of what the same ranks exchange
        for parties, entries in parts:
            for entry in entries:
                for shape in entry.param.shapes:
                    costs[tuple(parties)].append(newton_schulz.cost(*shape))
        owned = {ranks: iter(assign(of, len(ranks))) for ranks, of in costs.items()}
        stages = []
        for parties, entries in parts:
            exchange = self._exchange(parties, entries, owned[tuple(parties)], groups)
            stages.append((entries, exchange))
        self._stages = stages
        self._sent_before = sent_before([exchange.mean_bytes for _, exchange in stages])

    def _parts_of(
        self, engine: FsdpEngine, where: Where
    ) -> Iterator[tuple[Parties, list[MuonEntry]]]:
        """The parties and entries of each stage, in the order of units. A group of a unit gives as
        many stages as the size of what Muon updates of it asks for (`stages_of`)."""
        for unit in engine.units:
            for group in unit.groups:
                entries = self._entries_of(engine, group, where)
                if not entries:
                    continue
                parties = parties_in(group)
                self._connect(group.domain, tuple(parties))
                for part in stages_of([entry.param.numel for entry in entries]):
                    yield parties, entries[part]

    def _entries_of(self, engine: FsdpEngine, group: ParamGroup, where: Where) -> list[MuonEntry]:
        entries = []
        for pair in engine.pairs:
            if pair.group is group and id(pair.sharded) in where:
                number, local = where[id(pair.sharded)]
                split, parts = tensor_split(pair)
                layout = group.shards.held.layout
                param = MuonParam(layout, pair.index, split, parts, self._heights(pair))
                entries.append(MuonEntry(number, local, param))
        return entries

    def _connect(self, domain: ShardDomain, ranks: tuple[int, ...]) -> None:
        """Makes the communicator of these parties, if it is not there."""
        if ranks in self._communicators:
            return
        are_shards = ranks == domain.axis.ranks
        group = domain.reduce_group if are_shards else self._groups[ranks]
        self._communicators[ranks] = Communicator(group, self._runtime.device)

    def _exchange(
        self,
        parties: Parties,
        entries: Sequence[MuonEntry],
        owned: Iterator[int],
        groups: Sequence[GroupOptions],
    ) -> StageExchange:
        """The exchange of parameters whose matrices' owners come next in `owned`."""
        params = [entry.param for entry in entries]
        owners = [[next(owned) for _ in param.shapes] for param in params]
        ranks = tuple(parties)
        plan = plan_stage(params, owners, tuple(parties.values()), ranks.index(dist.get_rank()))
        first = groups[entries[0].group]
        dtype = self._chosen(first).dtype  # type: ignore[union-attr]
        result = newton_schulz.result_dtype(dtype)
        return StageExchange(plan, self._communicators[ranks], self._runtime, dtype, result)

    # A step.

    def update(self, shards: LocalShards, groups: Sequence[GroupOptions]) -> None:
        """Updates weights (see `UpdateRule`). ValueError if matrices of one stage have different
        options of Newton-Schulz."""
        self._plan(shards, groups)
        options: list[Any] = [self._chosen(group) for group in groups]
        stages = self._stages
        # Of the stages that were sent: which parameters have gradients.
        trained: list[list[bool]] = []
        for stage in stages:
            _check(stage, options)
        for number, (entries, exchange) in enumerate(stages):
            for ahead in stages[len(trained) : self._sent_before[number]]:
                trained.append(_send(shards, ahead, options))
            first = options[entries[0].group]
            orthogonalize = functools.partial(
                newton_schulz.orthogonalized,
                coefficients=first.coefficients,
                eps=first.eps,
                in_place=True,
            )
            exchange.compute(orthogonalize)
            if number > 0:  # one stage later: its updates travel while this one is computed
                _apply(shards, stages[number - 1], trained[number - 1], groups, options)
        if stages:
            _apply(shards, stages[-1], trained[-1], groups, options)


def _check(stage: Stage, options: Sequence[Any]) -> None:
    """ValueError if the matrices of a stage have different options of Newton-Schulz."""
    entries, _ = stage
    chosen = [options[entry.group] for entry in entries]
    if len({(one.coefficients, one.eps, one.dtype) for one in chosen}) > 1:
        raise ValueError(
            f"Muon: weights of one unit ({entries[0].param.name} and others) are in parameter "
            "groups with different Newton-Schulz coefficients, steps, eps or dtypes. Give all "
            "parameter groups the same"
        )


def _send(shards: LocalShards, stage: Stage, options: Sequence[Any]) -> list[bool]:
    """Adds the gradients to the momentum, and sends what is to be orthogonalized. Returns which
    parameters have gradients."""
    entries, exchange = stage
    rows: list[torch.Tensor | None] = []
    for group, local, _ in entries:
        grad = shards.gradient(local)
        if grad is None:
            rows.append(None)
            continue
        chosen = options[group]
        momentum = shards.completed(local, (MOMENTUM,))[MOMENTUM]
        momentum.lerp_(grad, 1 - chosen.momentum)
        update = grad.lerp(momentum, chosen.momentum) if chosen.nesterov else momentum
        rows.append(update.reshape(-1))
    exchange.send(rows)
    return [own is not None for own in rows]


def _apply(
    shards: LocalShards,
    stage: Stage,
    trained: Sequence[bool],
    groups: Sequence[GroupOptions],
    options: Sequence[Any],
) -> None:
    """Decays weights, and adds their updates when those have arrived."""
    entries, exchange = stage
    for (number, local, _), is_trained in zip(entries, trained, strict=True):
        group = groups[number]
        if is_trained and group["weight_decay"] != 0:
            local.mul_(1 - float(group["lr"]) * group["weight_decay"])
    for run, values in exchange.updates():
        if not trained[run.param]:
            continue
        number, local, param = entries[run.param]
        scale = options[number].scale(*param.shapes[run.matrix])
        alpha = -float(groups[number]["lr"]) * scale
        # `add_` casts on the way. Kernels for many tensors do not: separate casts would be two more
        # passes.
        local.view(-1)[run.place].add_(values, alpha=alpha)
