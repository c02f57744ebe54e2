"""What an optimizer's step asks of the device: the norm, the clip, and Adam, alone or streamed from
host memory, or Muon with its exchanges.

These are not run by the real optimizers, whose kernels the meta device does not have; the order of
launches is theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from megatron_fsdp_adapter.core.runtime.device import COMPUTE, GATHER, LOAD, STORE
from megatron_fsdp_adapter.sharding.muon.exchange import AHEAD
from megatron_fsdp_adapter.sharding.muon.newton_schulz import cost
from megatron_fsdp_adapter.sharding.muon.owners import assign, loads

from .program import Kind
from .timed_runtime import TimedRuntime

LAUNCHES = 2000.0
"""Reference microseconds in which the host launches norm, clip and Adam."""

UNIT_LAUNCHES = 300.0
"""The same of one unit of a step that goes unit by unit."""

BF16 = 2


@dataclass(frozen=True)
class UnitHeld:
    """What a rank updates of a unit. numel: elements; matrices: the shapes of whole matrices that
    Muon updates, and matrix_numel: elements of this rank's rows of them."""

    name: str
    numel: int
    matrices: tuple[tuple[int, int], ...] = ()
    matrix_numel: int = 0


@dataclass(frozen=True)
class Widths:
    """Bytes of an element: of gradients, main weights, optimizer state."""

    grad: int = 4
    main: int = 4
    state: int = 8


def write_norm(runtime: TimedRuntime, numel: int, widths: Widths, clips: bool) -> None:
    """The norm, which the host reads, and the clip."""
    runtime.spend(LAUNCHES)
    runtime.write(
        Kind.MEMORY, numel * widths.grad, label="gradient norm", part="norm", read=True
    )
    if clips:
        runtime.write(Kind.MEMORY, 2 * numel * widths.grad, label="clip", part="norm")


def write_adam(runtime: TimedRuntime, numel: int, widths: Widths, label: str = "Adam") -> None:
    nbytes = numel * (widths.grad + 2 * widths.main + 2 * widths.state)
    runtime.write(Kind.MEMORY, nbytes, label=label, part="optimizer")


def write_streamed(runtime: TimedRuntime, units: Sequence[UnitHeld], widths: Widths) -> None:
    """Main weights and state come from host memory unit by unit, and go back. Twins of two units
    exist at once: a unit's load waits for the store of the unit before the last."""
    stored: list[tuple[int, ...]] = []
    part = "optimizer"
    for number, unit in enumerate(units):
        moved = unit.numel * (widths.main + widths.state)
        if number >= 2:
            runtime.wait(LOAD, stored[number - 2])
        elif number == 0:
            runtime.wait(LOAD, runtime.record(COMPUTE))
        runtime.spend(UNIT_LAUNCHES)
        _copy(runtime, LOAD, Kind.FROM_HOST, moved, f"load {unit.name}")
        runtime.wait(COMPUTE, runtime.record(LOAD))
        write_adam(runtime, unit.numel, widths, f"Adam of {unit.name}")
        cast = unit.numel * (widths.main + BF16)
        runtime.write(Kind.MEMORY, cast, label=f"weights of {unit.name}", part=part)
        runtime.wait(STORE, runtime.record(COMPUTE))
        # The host waits for the last one.
        last = number == len(units) - 1
        _copy(runtime, STORE, Kind.TO_HOST, moved, f"store {unit.name}", read=last)
        stored.append(runtime.record(STORE))
    runtime.wait(COMPUTE, stored[-1])


def _copy(
    runtime: TimedRuntime, role: str, kind: Kind, nbytes: int, label: str, read: bool = False
) -> None:
    runtime.submit(
        role, partial(runtime.write, kind, nbytes, label=label, part="optimizer", read=read)
    )


def write_muon(
    runtime: TimedRuntime, units: Sequence[UnitHeld], ranks: int, axis: str, widths: Widths
) -> None:
    """Rows of each unit's matrices travel to their owners, some units ahead; what one of the ranks
    with most work computes; updates travel back."""
    rest = sum(unit.numel - unit.matrix_numel for unit in units)
    stages = [unit for unit in units if unit.matrices]
    shares = _shares([unit.matrices for unit in stages], ranks)
    part = "optimizer"

    def exchange(unit: UnitHeld, what: str) -> tuple[int, ...]:
        runtime.wait(GATHER, runtime.record(COMPUTE))
        if ranks > 1:
            runtime.submit(GATHER, partial(
                runtime.write, Kind.EXCHANGE, BF16 * unit.matrix_numel,
                label=f"{what} of {unit.name}", part=part, group=axis, channel=axis,
            ))  # fmt: skip
        return runtime.record(GATHER)

    def send(unit: UnitHeld) -> tuple[int, ...]:
        passes = unit.matrix_numel * (widths.grad + 2 * widths.main + BF16)
        runtime.write(Kind.MEMORY, passes, label=f"momentum of {unit.name}", part=part)
        return exchange(unit, "rows")

    rows = [send(unit) for unit in stages[:AHEAD]]
    updates = []
    for number, unit in enumerate(stages):
        runtime.spend(UNIT_LAUNCHES)
        runtime.wait(COMPUTE, rows[number])
        runtime.write(
            Kind.ITERATION, shares[number], label=f"Newton-Schulz of {unit.name}", part=part
        )
        updates.append(exchange(unit, "updates"))
        if number + AHEAD < len(stages):
            rows.append(send(stages[number + AHEAD]))
        if number:
            _apply(runtime, stages[number - 1], updates[number - 1], widths)
    if stages:
        _apply(runtime, stages[-1], updates[-1], widths)
    if rest:
        write_adam(runtime, rest, widths)


def _apply(
    runtime: TimedRuntime, unit: UnitHeld, arrived: tuple[int, ...], widths: Widths
) -> None:
    runtime.wait(COMPUTE, arrived)
    passes = unit.matrix_numel * (BF16 + 2 * widths.main)
    runtime.write(Kind.MEMORY, passes, label=f"update of {unit.name}", part="optimizer")


def _shares(
    of_units: Sequence[Sequence[tuple[int, int]]], ranks: int
) -> list[float]:
    """Operations of each unit on the rank that has most in all."""
    costs = [cost(*shape) for shapes in of_units for shape in shapes]
    owners = assign(costs, ranks)
    each = loads(costs, owners, ranks)
    most = each.index(max(each, default=0)) if costs else 0
    found, at = [], 0
    for shapes in of_units:
        mine = [costs[i] for i in range(at, at + len(shapes)) if owners[i] == most]
        found.append(float(sum(mine)))
        at += len(shapes)
    return found
