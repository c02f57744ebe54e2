"""The step of Muon on shards, in one optimizer with the inner one (`own_steps.py`).

Two optimizers in core's chain were rejected: the norm, the count of zeros and the names in a
checkpoint would each be put together from two. So was momentum on the owners, with gradients that
travel as soon as they are reduced: they are clipped by a norm that is known last, and momentum
would need a layout of its own in checkpoints.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...core.engine.engine import FsdpEngine
from ...core.engine.identity import ParamPair
from ...core.runtime.comm import Communicator
from ...core.topology import TP_DIM
from ..own_steps import Options, OwnSteps
from . import newton_schulz, owners
from .exchange import Groups, Parties, StageExchange, communicator_of, parties_in
from .matrices import MuonParam
from .plan import plan_stage, sent_before, stages_of

MOMENTUM = "momentum_buffer"
"""The name of Muon's state, as torch.optim.Muon has it."""

MOMENT2 = "moment2_buffer"
"""That of adaptive Muon, as NVIDIA's emerging_optimizers have it."""


@dataclass(frozen=True)
class SecondMoment:
    """An update is divided by sqrt(v) + eps, entry by entry, before it is scaled, where
    v <- beta v + (1 - beta) update^2 (AdaMuon, arxiv.org/abs/2507.11005)."""

    beta: float
    eps: float


@dataclass(frozen=True)
class MuonOptions:
    """How a parameter group is updated; lr and weight decay are the group's own.

    momentum: m <- momentum m + (1 - momentum) g; nesterov: what is orthogonalized is the same sum
    of g and the new m, and m without; coefficients: of each Newton-Schulz step; scale: of a
    matrix's rows and columns, the factor on its update; dtype: of the products and on the wire;
    second: of adaptive Muon.
    """

    momentum: float
    nesterov: bool
    coefficients: tuple[newton_schulz.Coefficients, ...]
    eps: float
    scale: Callable[[int, int], float]
    dtype: torch.dtype = torch.bfloat16
    second: SecondMoment | None = None

    @property
    def state(self) -> tuple[str, ...]:
        """Names of what is kept of a weight, in its shape."""
        return (MOMENTUM,) if self.second is None else (MOMENTUM, MOMENT2)


@dataclass(frozen=True)
class MuonRule:
    """What an optimizer's Muon is: which groups are its, their options, and of which parts of rows
    a parameter is made (`MuonParam.heights`)."""

    is_muon: Callable[[Options], bool]
    options: Callable[[Options], MuonOptions]
    heights: Callable[[ParamPair], tuple[int, ...]]


@dataclass
class Entry:
    """A parameter of a stage: its flat local rows, as parameter and as the key of its state."""

    group: int
    local: torch.Tensor
    param: MuonParam


@dataclass
class Stage:
    """What is exchanged together."""

    entries: list[Entry]
    exchange: StageExchange | None = None
    trained: list[bool] = field(default_factory=list)


def tensor_split(pair: ParamPair) -> tuple[int | None, int]:
    """The dim that tensor parallelism splits of a parameter, None if it splits none, and the number
    of tensor-parallel ranks."""
    mesh = pair.group.domain.mesh
    parts = mesh.size(-1) if (mesh.mesh_dim_names or ("",))[-1] == TP_DIM else 1
    return (pair.managed.split if parts > 1 else None), parts


class MuonShards(OwnSteps):
    """Local shards of an optimizer of which Muon updates some groups.

    Args:
        engines: those of the parameters. rule: which groups, and how. exchange: the process groups
        that `exchange_groups` has made for the engines.
    """

    def __init__(
        self, engines: Sequence[FsdpEngine], rule: MuonRule, exchange: Groups, optimizer: Any,
        skip_empty: bool, decoupled: bool,
    ) -> None:  # fmt: skip
        self._engines, self._rule, self._runtime = engines, rule, engines[0].runtime
        self._groups = exchange
        self._communicators: dict[tuple[int, ...], Communicator] = {}
        self._planned, self._stages = False, list[Stage]()
        self._sent_before: tuple[int, ...] = ()
        super().__init__(optimizer, skip_empty, decoupled)

    def state_names(self, group: Options) -> tuple[str, ...]:
        return self._rule.options(group).state if self._rule.is_muon(group) else ()

    # Planning.

    def regroup(self, optimizer: Any) -> None:
        self._planned = False
        super().regroup(optimizer)

    def _plan(self, groups: Sequence[Options]) -> None:
        """Plans once, and again when groups have other parameters: all ranks have the same ones."""
        if self._planned:
            return
        self._planned = True
        where = {
            id(param): (number, local)
            for number, group in enumerate(groups) if self._rule.is_muon(group)
            for param, local in self.pairs[number]
        }
        stages = [
            (parties, communicator, Stage(entries))
            for engine in self._engines
            for parties, communicator, entries in self._entries_of(engine, where)
        ]
        for ranks in dict.fromkeys(parties.ranks for parties, _, _ in stages):
            self._assign([row for row in stages if row[0].ranks == ranks], groups)
        self._stages = [stage for _, _, stage in stages]
        self._sent_before = sent_before(
            [stage.exchange.mean_bytes for stage in self._stages]  # type: ignore[union-attr]
        )

    def _entries_of(
        self, engine: FsdpEngine, where: dict[int, tuple[int, torch.Tensor]]
    ) -> Iterator[tuple[Parties, Communicator, list[Entry]]]:
        """What is exchanged together, in the order of the units: of each of their groups, what Muon
        updates, in as many parts as its size asks for."""
        for unit in engine.units:
            for group in unit.groups:
                pairs = [
                    pair for pair in engine.pairs
                    if pair.group is group and id(pair.sharded) in where
                ]
                if not pairs:
                    continue
                parties = parties_in(group)
                if parties.ranks not in self._communicators:
                    made = communicator_of(
                        parties, group.domain, self._groups, self._runtime.device
                    )
                    self._communicators[parties.ranks] = made
                entries = [
                    Entry(*where[id(pair.sharded)], self._muon_param(pair)) for pair in pairs
                ]
                numels = [sum(a * b for a, b in entry.param.shapes) for entry in entries]
                for part in stages_of(numels):
                    yield parties, self._communicators[parties.ranks], entries[part]

    def _muon_param(self, pair: ParamPair) -> MuonParam:
        split, parts = tensor_split(pair)
        layout = pair.group.held.layout
        return MuonParam(layout, pair.index, split, parts, self._rule.heights(pair))

    def _assign(
        self, rows: list[tuple[Parties, Communicator, Stage]], groups: Sequence[Options]
    ) -> None:
        """Owners for all matrices that the same ranks exchange."""
        parties, communicator, _ = rows[0]
        costs = [
            newton_schulz.cost(*shape)
            for _, _, stage in rows for entry in stage.entries for shape in entry.param.shapes
        ]  # fmt: skip
        found = iter(owners.assign(costs, len(parties.ranks)))
        for parties, communicator, stage in rows:
            params = [entry.param for entry in stage.entries]
            of = [[next(found) for _ in param.shapes] for param in params]
            plan = plan_stage(params, of, parties.members, parties.me)
            options = self._rule.options(groups[stage.entries[0].group])
            result = newton_schulz.result_dtype(options.dtype)
            stage.exchange = StageExchange(
                plan, communicator, self._runtime, options.dtype, result
            )

    # A step.

    def _check(self, groups: Sequence[Options]) -> None:
        """ValueError if matrices that are computed together are not to be computed alike."""
        for stage in self._stages:
            found = {
                (chosen.coefficients, chosen.eps, chosen.dtype)
                for chosen in (self._rule.options(groups[e.group]) for e in stage.entries)
            }
            if len(found) > 1:
                raise ValueError(
                    f"Muon: weights of one unit ({stage.entries[0].param.name} and others) are in "
                    "parameter groups with different Newton-Schulz coefficients, steps, eps or "
                    "dtypes; give all parameter groups the same"
                )

    def step_own(self, groups: Sequence[Options]) -> None:
        self._plan(groups)
        self._check(groups)
        stages, options = self._stages, functools.cache(lambda n: self._rule.options(groups[n]))
        sent = 0
        for number, stage in enumerate(stages):
            for ahead in stages[sent : self._sent_before[number]]:
                self._send(ahead, options)
            sent = self._sent_before[number]
            first = options(stage.entries[0].group)
            stage.exchange.compute(  # type: ignore[union-attr]
                functools.partial(
                    newton_schulz.orthogonalized, coefficients=first.coefficients, eps=first.eps,
                    in_place=True,
                )
            )
            if number > 0:
                self._apply(stages[number - 1], groups, options)
        if stages:
            self._apply(stages[-1], groups, options)

    def _send(self, stage: Stage, options: Callable[[int], MuonOptions]) -> None:
        """Adds the gradients to the momentum, and sends what is to be orthogonalized."""
        stage.trained = []
        rows: list[torch.Tensor | None] = []
        for entry in stage.entries:
            grad = self.gradient(entry.local)
            stage.trained.append(grad is not None)
            if grad is None:
                rows.append(None)
                continue
            chosen = options(entry.group)
            state = self.completed(entry.local, chosen.state)
            momentum = state[MOMENTUM].lerp_(grad, 1 - chosen.momentum)
            update = grad.lerp(momentum, chosen.momentum) if chosen.nesterov else momentum
            rows.append(update.reshape(-1))
        stage.exchange.send(rows)  # type: ignore[union-attr]

    def _apply(
        self, stage: Stage, groups: Sequence[Options], options: Callable[[int], MuonOptions]
    ) -> None:
        for entry, trained in zip(stage.entries, stage.trained, strict=True):
            group = groups[entry.group]
            if trained and group["weight_decay"] != 0:
                entry.local.mul_(1 - float(group["lr"]) * group["weight_decay"])
        for number, matrix, place, values in stage.exchange.updates():  # type: ignore[union-attr]
            entry = stage.entries[number]
            if not stage.trained[number]:
                continue
            chosen = options(entry.group)
            if chosen.second is not None:
                v = self.state[entry.local][MOMENT2].view(-1)[place]
                values = values.to(v.dtype)
                v.lerp_(values.square(), 1 - chosen.second.beta)
                values = values / (v.sqrt() + chosen.second.eps)
            alpha = -float(groups[entry.group]["lr"]) * chosen.scale(*entry.param.shapes[matrix])
            # It casts on the way. Kernels for many tensors do not, and casts of their own are two
            # passes more.
            entry.local.view(-1)[place].add_(values, alpha=alpha)
