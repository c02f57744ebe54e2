"""The step of Muon on shards, in one optimizer with the inner one.

Two optimizers in core's chain were rejected: the norm, the count of zeros and the names in a
checkpoint would each be put together from two. So was momentum on the owners, with gradients that
travel as soon as they are reduced: they are clipped by a norm that is known last, and momentum
would need a layout of its own in checkpoints.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ...core.comm.communicator import Communicator
from ...core.engine.engine import FsdpEngine
from ...core.engine.params import ParamPair
from ...core.topology import TP_DIM
from ..local_shards import LocalShards, Options, UpdateRule
from . import newton_schulz
from .exchange import Groups, Parties, StageExchange, parties_in
from .matrices import MuonParam
from .plan import assign, plan_stage, sent_before, stages_of

MOMENTUM = "momentum_buffer"
"""The name of Muon's state, as torch.optim.Muon has it."""


@dataclass(frozen=True)
class MuonOptions:
    """The options of a parameter group's update; lr and weight decay are the group's own.

    momentum: m <- momentum m + (1 - momentum) g; nesterov: what is orthogonalized is the same sum
    of g and the new m, and m without; coefficients: of each Newton-Schulz step; scale: of a
    matrix's rows and columns, the factor on its update; dtype: of the products and on the wire.
    """

    momentum: float
    nesterov: bool
    coefficients: tuple[newton_schulz.Coefficients, ...]
    eps: float
    scale: Callable[[int, int], float]
    dtype: torch.dtype = torch.bfloat16


Chosen = Callable[[Options], MuonOptions | None]
"""Chooses the options of a parameter group, None if it is not Muon's."""
Heights = Callable[[ParamPair], tuple[int, ...]]
"""Chooses the heights of the parts that a parameter is made of (`MuonParam.heights`)."""
Entry = tuple[int, torch.Tensor, MuonParam]
"""A parameter's group, and its local tensor, which is the key of its state."""


Stage = tuple[list[Entry], StageExchange]
"""The parameters that are exchanged together."""


def tensor_split(pair: ParamPair) -> tuple[int | None, int]:
    """The dim that tensor parallelism splits of a parameter, None if it splits none, and the number
    of tensor-parallel ranks."""
    mesh = pair.group.domain.mesh
    parts = mesh.size(-1) if (mesh.mesh_dim_names or ("",))[-1] == TP_DIM else 1
    return (pair.managed.split if parts > 1 else None), parts


def muon(
    engines: Sequence[FsdpEngine], exchange: Groups, chosen: Chosen, heights: Heights
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
        self, engines: Sequence[FsdpEngine], exchange: Groups, chosen: Chosen, heights: Heights
    ) -> None:
        self._engines, self._runtime = engines, engines[0].runtime
        self._groups, self._chosen, self._heights = exchange, chosen, heights
        self._communicators: dict[tuple[int, ...], Communicator] = {}
        self._pairs: Any = None
        self._stages: list[Stage] = []
        self._sent_before: tuple[int, ...] = ()

    # Planning.

    def _plan(self, shards: LocalShards, groups: Sequence[Options]) -> None:
        """Plans once, and again when groups have other parameters: all ranks have the same ones."""
        if self._pairs is shards.pairs:
            return
        self._pairs = shards.pairs
        where = {
            id(param): (number, local)
            for number, group in enumerate(groups) if self._chosen(group) is not None
            for param, local in shards.pairs[number]
        }  # fmt: skip
        rows = [row for engine in self._engines for row in self._rows_of(engine, where)]
        owned = {}  # of what the same ranks exchange
        for ranks in dict.fromkeys(tuple(parties) for parties, _ in rows):
            costs = [
                newton_schulz.cost(*shape)
                for parties, entries in rows if tuple(parties) == ranks
                for _, _, param in entries for shape in param.shapes
            ]  # fmt: skip
            owned[ranks] = iter(assign(costs, len(ranks)))
        self._stages = [
            (entries, self._exchange(parties, entries, owned[tuple(parties)], groups))
            for parties, entries in rows
        ]
        self._sent_before = sent_before([exchange.mean_bytes for _, exchange in self._stages])

    def _rows_of(
        self, engine: FsdpEngine, where: dict[int, tuple[int, torch.Tensor]]
    ) -> Iterator[tuple[Parties, list[Entry]]]:
        """The entries that are exchanged together, in the order of the units: of each of their
        groups, what Muon updates, in as many parts as its size asks for."""
        for unit in engine.units:
            for group in unit.groups:
                entries: list[Entry] = []
                for pair in engine.pairs:
                    if pair.group is group and id(pair.sharded) in where:
                        split, parts = tensor_split(pair)
                        param = MuonParam(
                            group.held.layout, pair.index, split, parts, self._heights(pair)
                        )
                        entries.append((*where[id(pair.sharded)], param))
                if not entries:
                    continue
                parties, domain = parties_in(group), group.domain
                ranks = tuple(parties)
                if ranks not in self._communicators:
                    are_shards = ranks == domain.axis.ranks
                    self._communicators[ranks] = Communicator(
                        domain.reduce_group if are_shards else self._groups[ranks],
                        self._runtime.device,
                    )
                numels = [sum(a * b for a, b in param.shapes) for _, _, param in entries]
                for part in stages_of(numels):
                    yield parties, entries[part]

    def _exchange(
        self, parties: Parties, entries: Sequence[Entry], owned: Iterator[int],
        groups: Sequence[Options],
    ) -> StageExchange:  # fmt: skip
        """The exchange of parameters whose matrices' owners come next in `owned`."""
        params = [param for _, _, param in entries]
        of = [[next(owned) for _ in param.shapes] for param in params]
        ranks = tuple(parties)
        plan = plan_stage(params, of, tuple(parties.values()), ranks.index(dist.get_rank()))
        dtype = self._chosen(groups[entries[0][0]]).dtype  # type: ignore[union-attr]
        result = newton_schulz.result_dtype(dtype)
        return StageExchange(plan, self._communicators[ranks], self._runtime, dtype, result)

    # A step.

    def update(self, shards: LocalShards, groups: Sequence[Options]) -> None:
        """Updates weights (see `UpdateRule`). ValueError if matrices that are computed together are
        not to be computed alike."""
        self._plan(shards, groups)
        options: list[Any] = [self._chosen(group) for group in groups]
        stages, trained, sent = self._stages, list[list[bool]](), 0
        for stage in stages:
            _check(stage, options)
        for number, stage in enumerate(stages):
            for ahead in stages[sent : self._sent_before[number]]:
                trained.append(_send(shards, ahead, options))
            sent = self._sent_before[number]
            entries, exchange = stage
            first = options[entries[0][0]]
            exchange.compute(
                functools.partial(
                    newton_schulz.orthogonalized, coefficients=first.coefficients, eps=first.eps,
                    in_place=True,
                )
            )
            if number > 0:
                _apply(shards, stages[number - 1], trained[number - 1], groups, options)
        if stages:
            _apply(shards, stages[-1], trained[-1], groups, options)


def _check(stage: Stage, options: Sequence[Any]) -> None:
    entries, _ = stage
    chosen = [options[group] for group, _, _ in entries]
    if len({(one.coefficients, one.eps, one.dtype) for one in chosen}) > 1:
        raise ValueError(
            f"Muon: weights of one unit ({entries[0][2].name} and others) are in parameter "
            "groups with different Newton-Schulz coefficients, steps, eps or dtypes. Give all "
            "parameter groups the same"
        )


def _send(shards: LocalShards, stage: Stage, options: Sequence[Any]) -> list[bool]:
    """Adds the gradients to the momentum, and sends what is to be orthogonalized. Returns which
    parameters have gradients."""
    (entries, exchange), rows = stage, list[torch.Tensor | None]()
    for group, local, _ in entries:
        grad, chosen = shards.gradient(local), options[group]
        if grad is None:
            rows.append(None)
            continue
        momentum = shards.completed(local, (MOMENTUM,))[MOMENTUM]
        momentum.lerp_(grad, 1 - chosen.momentum)
        update = grad.lerp(momentum, chosen.momentum) if chosen.nesterov else momentum
        rows.append(update.reshape(-1))
    exchange.send(rows)
    return [own is not None for own in rows]


def _apply(
    shards: LocalShards, stage: Stage, trained: Sequence[bool], groups: Sequence[Options],
    options: Sequence[Any],
) -> None:  # fmt: skip
    entries, exchange = stage
    for (number, local, _), is_trained in zip(entries, trained, strict=True):
        group = groups[number]
        if is_trained and group["weight_decay"] != 0:
            local.mul_(1 - float(group["lr"]) * group["weight_decay"])
    for entry, matrix, place, values in exchange.updates():
        number, local, param = entries[entry]
        if not trained[entry]:
            continue
        alpha = -float(groups[number]["lr"]) * options[number].scale(*param.shapes[matrix])
        # It casts on the way. Kernels for many tensors do not, and casts of their own are two
        # passes more.
        local.view(-1)[place].add_(values, alpha=alpha)
