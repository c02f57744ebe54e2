"""What an optimizer's step asks of the device: the norm, the clip, and Adam, alone or streamed from
host memory, or Muon with its exchanges.

These are not run by the real optimizers, whose kernels the meta device does not have; the order of
launches is theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from megatron_fsdp_adapter.core.engine.engine import FsdpEngine
from megatron_fsdp_adapter.core.engine.unit import Unit
from megatron_fsdp_adapter.core.engine.updates import LateUpdates
from megatron_fsdp_adapter.core.runtime.device import COMPUTE, GATHER, LOAD, STORE, UPDATE
from megatron_fsdp_adapter.sharding.muon.newton_schulz import cost
from megatron_fsdp_adapter.sharding.muon.plan import sent_before
from megatron_fsdp_adapter.sharding.streamed_optimizer import CHUNKS

from .muon import MuonWork
from .program import Kind
from .timed_runtime import TimedRuntime

LAUNCHES = 2000.0
"""Reference microseconds in which the host launches norm, clip and Adam."""

UNIT_LAUNCHES = 300.0
"""The same of one unit of a step that goes unit by unit."""

BF16, FLOAT32 = 2, 4


@dataclass(frozen=True)
class GroupMatrices:
    """What Muon updates of a group: its domain, the shapes of the whole matrices, and the elements
    of this rank's rows of them."""

    domain: str
    matrices: tuple[tuple[int, int], ...]
    numel: int


@dataclass(frozen=True)
class UnitHeld:
    """What a rank updates of a unit. numel: elements; moved: bytes of it that are in host memory,
    where the optimizer is; muons: what Muon updates of its groups."""

    name: str
    numel: int
    moved: int = 0
    muons: tuple[GroupMatrices, ...] = ()


ONE_PASS = 0.81
"""Time of the one-pass Adam (`sharding/one_pass_adam.py`) in that of Transformer Engine's, after
which the rates of memory are: 3.36 of 4.14 TB/s, H200."""


@dataclass(frozen=True)
class Widths:
    """Bytes of an element: of gradients, main weights, optimizer state. adam: by what the time of
    Adam's pass over them is multiplied."""

    grad: int = 4
    main: int = 4
    state: int = 8
    adam: float = ONE_PASS


def write_norm(runtime: TimedRuntime, numel: int, widths: Widths, clips: bool) -> None:
    """The norm, which the host reads, and the clip."""
    runtime.spend(LAUNCHES)
    runtime.write(Kind.MEMORY, numel * widths.grad, label="gradient norm", part="norm", read=True)
    if clips:
        runtime.write(Kind.MEMORY, 2 * numel * widths.grad, label="clip", part="norm")


def write_adam(runtime: TimedRuntime, numel: int, widths: Widths, label: str = "Adam") -> None:
    nbytes = widths.adam * numel * (widths.grad + 2 * widths.main + 2 * widths.state)
    runtime.write(Kind.MEMORY, round(nbytes), label=label, part="optimizer")


class TimedStream:
    """The walk of `sharding/streamed_optimizer.py`: units in the order of a forward, each loaded,
    updated and stored on streams of its own, `CHUNKS` at a time; the next forward's gathers wait
    for them. Where weights are quantised, which are made of all of them, a step waits for all."""

    def __init__(
        self, runtime: TimedRuntime, engine: FsdpEngine, held: Sequence[UnitHeld], widths: Widths
    ) -> None:
        self._runtime, self._engine, self._widths = runtime, engine, widths
        self._held = {id(unit): own for unit, own in zip(engine.units, held, strict=True)}
        self._order: list[Unit] = []
        self._loaded: dict[int, tuple[int, ...]] = {}
        engine.gather.updates.join(self)

    def walk(self) -> None:
        """A step."""
        runtime, updates = self._runtime, self._engine.gather.updates
        self._plan_order()
        for role in (LOAD, UPDATE):
            runtime.wait(role, runtime.record(COMPUTE))
        for number, unit in enumerate(self._order):
            for coming in self._order[number : number + CHUNKS]:
                self._load(coming)
            runtime.wait(UPDATE, self._loaded.pop(id(unit)))
            runtime.spend(UNIT_LAUNCHES)
            runtime.submit(UPDATE, partial(self._update, self._held[id(unit)]))
            updates.queued(unit, runtime.record(UPDATE))
            self._store(unit, waits=unit is self._order[-1] and self._engine.quantisation)
        self._order = []

    def load_ahead(self, of: LateUpdates, after: Sequence[int]) -> None:
        if self._engine.quantisation is None:
            self._plan_order()
            self._runtime.wait(LOAD, after)
            for unit in self._order[:CHUNKS]:
                self._load(unit)

    def drop_loads(self) -> None:
        """A step follows in what is timed."""

    def settle(self) -> None:
        """Nobody reads main weights in what is timed."""

    def _plan_order(self) -> None:
        if not self._order:
            known = [*self._engine.order.forward(), *range(len(self._engine.units))]
            units = [self._engine.units[ordinal] for ordinal in dict.fromkeys(known)]
            self._order = [unit for unit in units if self._held[id(unit)].moved]

    def _load(self, unit: Unit) -> None:
        if id(unit) not in self._loaded:
            self._copy(LOAD, Kind.FROM_HOST, unit, "load")
            self._loaded[id(unit)] = self._runtime.record(LOAD)

    def _update(self, held: UnitHeld) -> None:
        write_adam(self._runtime, held.numel, self._widths, f"Adam of {held.name}")
        cast = held.numel * (self._widths.main + BF16)
        self._runtime.write(Kind.MEMORY, cast, label=f"weights of {held.name}", part="optimizer")

    def _store(self, unit: Unit, waits: object) -> None:
        runtime = self._runtime
        runtime.wait(STORE, unit.updated)
        self._copy(STORE, Kind.TO_HOST, unit, "store", bool(waits))
        stored = runtime.record(STORE)
        runtime.wait(LOAD, stored)
        if waits:
            runtime.wait(COMPUTE, stored)

    def _copy(self, role: str, kind: Kind, unit: Unit, word: str, read: bool = False) -> None:
        held = self._held[id(unit)]
        write = partial(
            self._runtime.write, kind, held.moved, label=f"{word} {held.name}", part="optimizer",
            read=read,
        )  # fmt: skip
        self._runtime.submit(role, write)


def write_muon(
    runtime: TimedRuntime, units: Sequence[UnitHeld], work: MuonWork, widths: Widths
) -> None:
    """Rows of each unit's matrices travel to their owners, some units ahead; what one of the ranks
    with most work computes; updates travel back."""
    stages = [(unit.name, group) for unit in units for group in unit.muons]
    rest = sum(unit.numel for unit in units) - sum(group.numel for _, group in stages)
    part = "optimizer"

    def exchange(name: str, group: GroupMatrices, what: str) -> tuple[int, ...]:
        runtime.wait(GATHER, runtime.record(COMPUTE))
        if work.ranks[group.domain] > 1:
            runtime.submit(GATHER, partial(
                runtime.write, Kind.EXCHANGE, BF16 * group.numel, label=f"{what} of {name}",
                part=part, group=group.domain, channel=group.domain,
            ))  # fmt: skip
        return runtime.record(GATHER)

    def send(name: str, group: GroupMatrices) -> tuple[int, ...]:
        passes = group.numel * (widths.grad + 2 * widths.main + BF16)
        runtime.write(Kind.MEMORY, passes, label=f"momentum of {name}", part=part)
        return exchange(name, group, "rows") if work.sends_rows else runtime.record(GATHER)

    ahead = sent_before([2 * BF16 * group.numel for _, group in stages])
    rows, updates = list[tuple[int, ...]](), list[tuple[int, ...]]()
    for number, (name, group) in enumerate(stages):
        rows += [send(*coming) for coming in stages[len(rows) : ahead[number]]]
        runtime.spend(UNIT_LAUNCHES)
        runtime.wait(COMPUTE, rows[number])
        operations = work.most[group.domain] * sum(cost(*one) for one in group.matrices)
        runtime.write(Kind.ITERATION, operations, label=f"Newton-Schulz of {name}", part=part)
        updates.append(exchange(name, group, "updates"))
        if number:
            _apply(runtime, *stages[number - 1], updates[number - 1], widths)
    if stages:
        _apply(runtime, *stages[-1], updates[-1], widths)
    if rest:
        write_adam(runtime, rest, widths)


def _apply(
    runtime: TimedRuntime, name: str, group: GroupMatrices, arrived: tuple[int, ...],
    widths: Widths,
) -> None:  # fmt: skip
    runtime.wait(COMPUTE, arrived)
    passes = group.numel * (BF16 + 2 * widths.main)
    runtime.write(Kind.MEMORY, passes, label=f"update of {name}", part="optimizer")
