"""Simulates the times of a program's operations: streams, communicators, the host, and contention.

Between two events every running operation proceeds at a rate that depends on the concurrent ones. A
stream runs one operation at a time, in launch order, after its launch by the host and after its
dependencies. A communicator runs one collective at a time, in launch order.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from megatron_fsdp_adapter.core.runtime.device import COMPUTE

from .machine import Group, Machine, collective_seconds, operation_seconds
from .program import COLLECTIVES, PRODUCTS, Kind, Operation, Program

EXPOSED = "exposed"
IDLE = "idle"
HOST = "waits for the host"


NetworkGroups = Mapping[str, Group]
"""Name of an axis -> its group."""

Window = tuple[float, dict[str, float]]
"""Seconds of a part of a program, and seconds by purpose: parts of compute, "exposed <collective>",
idle, host."""


@dataclass
class State:
    """State of the simulation. Operations are named by their number in the program."""

    program: Program
    # Of each operation: its seconds without others beside it.
    alone: list[float]
    # The time at which the host launched it; infinite before.
    launched: list[float]
    # The time at which it ended; negative before.
    ends: list[float]
    # Of each stream: what has not begun.
    queues: dict[str, deque[int]] = field(default_factory=dict)
    # The operation before it on its communicator; -1 for none.
    before_on_channel: list[int] = field(default_factory=list)
    # Of each busy stream: its operation; and of that one the seconds that are left of `alone`.
    running: dict[str, int] = field(default_factory=dict)
    left: dict[int, float] = field(default_factory=dict)


COMPUTES = (*PRODUCTS, Kind.ATTENTION)

STEP = ("step", 1)
"""The window of the second step. The first step learns the order of units."""


def time_windows(
    program: Program,
    machine: Machine,
    groups: NetworkGroups,
    windows: Sequence[tuple[str, int]],
) -> list[Window]:
    """Times windows of one run of a program.

    windows: name and number of the mark at which a window begins. It ends at the next mark of that
    name, or at the program's end. The first window decides the slowdown by the power limit."""
    state, intervals = simulate(program, machine, groups)
    gpu = machine.gpu
    seconds, spent = _window(state, intervals, windows[0])
    duty = spent.get("products", 0.0) / max(seconds, 1e-12)
    if gpu.sustained > 1.0 and duty > gpu.busy:
        slower = 1.0 + (gpu.sustained - 1.0) * (duty - gpu.busy) / (1.0 - gpu.busy)
        hot = replace(gpu, product_tflops=gpu.product_tflops / slower)
        state, intervals = simulate(program, replace(machine, gpu=hot), groups)
    return [_window(state, intervals, window) for window in windows]


Interval = tuple[float, float, tuple[int, ...], bool]
"""Begin, end, running operations, and True if compute waited for the host."""


def simulate(
    program: Program, machine: Machine, groups: NetworkGroups
) -> tuple[State, list[Interval]]:
    """Simulates a run of a program; returns the times of its operations, and its intervals, in
    which the same operations run."""
    state = _prepare(program, machine, groups)
    intervals: list[Interval] = []
    now = 0.0
    remaining = len(program.operations)
    while remaining:
        _begin_ready(state, now)
        next_launch = _next_launch(state, now)
        if not state.running:
            if math.isinf(next_launch):
                raise RuntimeError("the program has a circular dependency")
            intervals.append((now, next_launch, (), True))
            now = next_launch
            continue
        rates = _rates(state, machine)
        running = tuple(state.running.values())
        step = min(state.left[i] / rates[i] for i in running)
        step = min(step, next_launch - now)
        late = COMPUTE not in state.running and _waits_for_host(state, now)
        intervals.append((now, now + step, running, late))
        now += step
        for role, index in list(state.running.items()):
            state.left[index] -= step * rates[index]
            if state.left[index] > 1e-12:
                continue
            state.ends[index] = now
            if program.operations[index].read:  # the host has waited for it
                _launch(state, index + 1, now, machine.host)
            del state.running[role]
            del state.left[index]
            remaining -= 1
    return state, intervals


def _prepare(program: Program, machine: Machine, groups: NetworkGroups) -> State:
    """The state before the first operation runs."""
    alone: list[float] = []
    last: dict[str, int] = {}
    state = State(program, alone, [math.inf] * len(program.operations), [])
    for index, one in enumerate(program.operations):
        alone.append(_alone(one, machine, groups))
        state.queues.setdefault(one.role, deque()).append(index)
        before = -1
        if one.channel:
            before = last.get(one.channel, -1)
            last[one.channel] = index
        state.before_on_channel.append(before)
    _launch(state, 0, 0.0, machine.host)
    state.ends = [-1.0] * len(alone)
    return state


def _launch(state: State, begin: int, now: float, host: float) -> None:
    """Sets launch times from operation `begin` up to the next whose result the host reads. host:
    launch time relative to the reference host."""
    for index in range(begin, len(state.launched)):
        one = state.program.operations[index]
        now += one.host * 1e-6 * host
        state.launched[index] = now
        if one.read:
            break


def _alone(one: Operation, machine: Machine, groups: NetworkGroups) -> float:
    """Seconds of an operation without others beside it."""
    if one.kind in COLLECTIVES:
        group = groups[one.group]
        seconds = collective_seconds(one.kind, one.amount, group, machine.network, one.copy_engine)
        return max(1e-9, seconds)
    return operation_seconds(one.kind, one.amount, machine.gpu, one.kernels)


def _blocked(state: State, index: int) -> bool:
    """True if another operation must end first."""
    one = state.program.operations[index]
    before = state.before_on_channel[index]
    if before >= 0 and state.ends[before] < 0:
        return True
    return any(state.ends[i] < 0 for i in one.after)


def _waiting(state: State) -> dict[str, int]:
    """The next operation of each idle stream."""
    return {
        role: queue[0]
        for role, queue in state.queues.items()
        if queue and role not in state.running
    }


def _is_launched(state: State, index: int, now: float) -> bool:
    return state.launched[index] <= now + 1e-12


def _begin_ready(state: State, now: float) -> None:
    """Begins the next operation of each idle stream, if it is launched and not blocked."""
    for role, index in _waiting(state).items():
        if _is_launched(state, index, now) and not _blocked(state, index):
            state.queues[role].popleft()
            state.running[role] = index
            state.left[index] = state.alone[index]


def _next_launch(state: State, now: float) -> float:
    """The time at which the host launches the next operation of an idle stream; infinity for
    never."""
    waiting = _waiting(state).values()
    later = [state.launched[i] for i in waiting if not _is_launched(state, i, now)]
    return min(later, default=math.inf)


def _waits_for_host(state: State, now: float) -> bool:
    """True if the compute stream's next operation waits only for its launch."""
    head = _waiting(state).get(COMPUTE)
    if head is None or _is_launched(state, head, now):
        return False
    return not _blocked(state, head)


def _rates(state: State, machine: Machine) -> dict[int, float]:
    """Number of a running operation -> its speed relative to running alone."""
    operations = state.program.operations
    rates = {}
    for role, index in state.running.items():
        slowed = 1.0
        for beside, other in state.running.items():
            if beside != role:
                slowed = max(slowed, _slowdown(operations[index], operations[other], machine))
        rates[index] = 1.0 / slowed
    return rates


def _slowdown(one: Operation, other: Operation, machine: Machine) -> float:
    """The factor by which `one` takes longer beside `other`."""
    computes = other.kind in COMPUTES
    if one.kind in COMPUTES:
        if other.kind not in COLLECTIVES:
            return machine.product_beside_memory
        return machine.product_beside_copies if other.copy_engine else machine.product_beside_nccl
    if one.kind is Kind.MEMORY:
        return machine.memory_beside_product if computes else machine.memory_beside_nccl
    if not computes:
        return 1.0
    if one.copy_engine:
        exchanges = one.kind is Kind.EXCHANGE
        return machine.exchange_beside_product if exchanges else machine.copies_beside_product
    gathers = one.kind is Kind.ALL_GATHER
    return machine.gather_beside_product if gathers else machine.reduce_beside_product


def _window(state: State, intervals: Sequence[Interval], window: tuple[str, int]) -> Window:
    """The times of a window. It begins and ends when the compute stream passes a mark."""
    mark, number = window
    operations = state.program.operations
    marks = [count for name, count in state.program.marks if name == mark]
    marks.append(len(operations))
    begin = _passed(state, marks[number])
    end = _passed(state, marks[number + 1])
    spent: dict[str, float] = {}
    for start, stop, running, late in intervals:
        inside = min(stop, end) - max(start, begin)
        if inside <= 0:
            continue
        for name in _purposes(operations, running, late):
            spent[name] = spent.get(name, 0.0) + inside
    return end - begin, spent


def _passed(state: State, count: int) -> float:
    """The time at which the compute stream passes a mark that `count` operations precede."""
    operations = state.program.operations
    for index in range(count - 1, -1, -1):
        if operations[index].role == COMPUTE:
            return state.ends[index]
    return 0.0


def _purposes(operations: Sequence[Operation], running: tuple[int, ...], late: bool) -> list[str]:
    """The purposes that an interval counts for: one, and "products" besides if a GEMM runs. late:
    True if compute waits for the host."""
    found = []
    compute = next((operations[i] for i in running if operations[i].role == COMPUTE), None)
    if compute is not None:
        if compute.kind in COLLECTIVES:
            found.append(f"{EXPOSED} {compute.kind.value} of the model")
        else:
            found.append(compute.part)
        if compute.kind in PRODUCTS:
            found.append("products")
        return found
    if late:
        return [HOST]
    carried = [operations[i] for i in running if operations[i].kind in COLLECTIVES]
    if carried:
        return [f"{EXPOSED} {carried[0].kind.value}"]
    return [IDLE]
