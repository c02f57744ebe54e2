"""A runtime for tests that finds races between roles without a GPU, and writes down the schedule.

Everything runs at once, in program order, on the CPU; but each role keeps a vector clock, and only
`record` and `wait` carry the past of one role into another, as events do for CUDA streams. While
`watch()` is active every operation that torch dispatches, backward's included, is attributed to
the role whose `submit` is running (else to compute), and each storage that it touches must have
been handed over:

    read             after the last write
    write, release   after the last write and every read since; released by the role that allocated,
                     whose later allocations are given the same memory in its own order
    the end of a     after every use, as seen by the role that it was made on: its memory goes back
    temporary        to that role (this is what keeping tensors alive until an event is for)

Uses conflict where their bytes overlap: a gather in place may fill the other ranks' slices while
this rank's slice is read. All storages are checked, not only labeled ones: program order makes
compute's own activations conflict-free, so this adds no noise, and it catches a gradient or a cast
copy that crosses roles unnoticed. Only labeled buffers are written to the log. Reading bytes that
are released, or that were allocated and not written yet, is an error on any role.

What it cannot see: the host waiting for the device (`.item()`) orders nothing here, on purpose, as
a schedule must not depend on it; and tasks run when submitted, so a task that reads host state
which changes before a deferred run is for tests of `HostRuntime`.

Checked against `CudaRuntime` (`core/runtime/device.py`), and streams and events of torch 2.13.
"""

from __future__ import annotations

import sys
import weakref
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_fsdp_adapter.core.runtime.device import COMPUTE, ROLES, Works, storage_bytes

READ = "read"
WRITE = "write"
ALLOCATE = "allocate"
RELEASE = "release"
RECORD = "record"
WAIT = "wait"
MARK = "mark"

METADATA_ONLY = frozenset({
    "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "new_empty",
    "new_zeros", "new_ones", "new_full", "new_empty_strided", "is_same_size",
})  # fmt: skip
"""Operations that look at shape, dtype and device of their inputs, never at the data."""


def who_asks(depth: int = 2) -> Any:
    """The frame that called a method of a runtime, from inside that method: not those of `follow`
    and `free`, which call others."""
    frame = sys._getframe(depth)
    while frame.f_code.co_filename == __file__ and frame.f_code.co_name in ("follow", "free"):
        frame = frame.f_back  # type: ignore[assignment]
    return frame


class RaceError(AssertionError):
    """Two uses of one storage are not ordered, or storage was used that is not there."""


Entry = namedtuple("Entry", "role action what op nbytes", defaults=("", 0))
"""One line of the log. `what` is the label of a buffer (read, write, allocate, release), the
role that an event is of (record, wait) or free text (mark); `nbytes` is the extent in the
buffer."""

ClockEvent = namedtuple("ClockEvent", "role clock")
"""What had happened before, by role, when `role` recorded this."""


Span = tuple[int, int]
"""Bytes start <= b < stop of a storage."""


def _span(tensor: torch.Tensor) -> Span:
    """From the first to the last byte of a tensor that is not empty."""
    axes = zip(tensor.shape, tensor.stride(), strict=True)
    first = int(tensor.storage_offset())
    itemsize = tensor.element_size()
    last = first + sum((size - 1) * stride for size, stride in axes)
    return first * itemsize, (last + 1) * itemsize


def _overlap(one: Span, other: Span) -> bool:
    return one[0] < other[1] and other[0] < one[1]


def _without(spans: list[Span], hole: Span) -> list[Span]:
    """What of `spans` is outside `hole`."""
    pieces = [(a, min(b, hole[0])) for a, b in spans] + [(max(a, hole[1]), b) for a, b in spans]
    return [(start, stop) for start, stop in pieces if start < stop]


_Use = namedtuple("_Use", "role epoch action op span")


@dataclass
class _Tracked:
    """What is known of one storage. `home` is the role whose allocations may reuse its memory;
    `uses` are those that later ones must be ordered behind; `undefined` was not written yet."""

    home: str
    alive: Any
    label: str = "an unnamed tensor"
    named: bool = False
    uses: list[_Use] = field(default_factory=list)
    undefined: list[Span] = field(default_factory=list)

    def remember(self, use: _Use) -> None:
        """Adds `use`, which is ordered behind those it conflicts with, and forgets what it
        stands for: all inside a write; for a read, the same read before."""
        if use.action == READ:
            self.uses = [
                u for u in self.uses if (u.action, u.role, u.span) != (READ, use.role, use.span)
            ]
        else:
            start, stop = use.span
            self.uses = [u for u in self.uses if not (start <= u.span[0] and u.span[1] <= stop)]
        self.uses.append(use)


class _Watcher(TorchDispatchMode):
    """Shows every dispatched operation to the runtime, before it runs and after."""

    def __init__(self, runtime: RecordingRuntime) -> None:
        super().__init__()
        self.runtime = runtime

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a wrapper: it comes back here with the tensors it wraps
        kwargs = kwargs or {}
        name = func._schema.name.split("::")[1]
        if name in METADATA_ONLY or _only_views(func):
            return func(*args, **kwargs)
        reads, writes = _operands(func, args, kwargs)
        self.runtime._used(READ, reads, name)
        self.runtime._used(WRITE, writes, name)
        result = func(*args, **kwargs)
        known = {tensor.untyped_storage()._cdata for tensor in reads + writes}
        made = [t for t in _tensors(result) if t.untyped_storage()._cdata not in known]
        self.runtime._used(WRITE, made, name)
        return result


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [value for value in tree_leaves(tree) if isinstance(value, torch.Tensor)]


def _only_views(func: Any) -> bool:
    """Whether all results alias an input that is not written: nothing is read."""
    aliases = [result.alias_info for result in func._schema.returns]
    return bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)


def _operands(func: Any, args: Any, kwargs: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Tensors that an operation reads, and those that it writes. The schemas of collectives do
    not say what is written: it is their first argument, except where that is sent."""
    reads: list[torch.Tensor] = []
    writes: list[torch.Tensor] = []
    collective = func.namespace == "c10d"
    for position, argument in enumerate(func._schema.arguments):
        if position < len(args):
            value = args[position]
        else:
            value = kwargs.get(argument.name)
        written = argument.alias_info is not None and argument.alias_info.is_write
        if collective:
            written = position == 0 and "send" not in func._schema.name
        (writes if written else reads).extend(_tensors(value))
    return reads, writes


class RecordingRuntime:
    """A `Runtime` on the CPU with a vector clock per role. See the module's text.

    Args:
        others: names of streams that the model has beside the engine's roles.

    Attributes:
        log: what happened to labeled buffers and events, in host order.
    """

    host_waits = False  # as on CUDA

    def __init__(self, *others: str) -> None:
        self.device = torch.device("cpu")
        self.poison = False
        self.log: list[Entry] = []
        roles = (*ROLES, *others)
        self._clocks = {role: {name: int(name == role) for name in roles} for role in roles}
        self._role = COMPUTE
        self._storages: dict[int, _Tracked] = {}
        self._late: list[str] = []

    # Runtime.

    def submit(self, role: str, *tasks: Callable[[], Works]) -> None:
        outer = self._role
        self._role = role
        try:
            for task in tasks:
                for work in task() or ():
                    work.wait()
        finally:
            self._role = outer

    launch = submit  # as on CUDA, the role's stream is the only order there is

    def record(self, role: str) -> ClockEvent:
        """A copy of the role's clock; what the role does from now on is not in it."""
        self._note(role, RECORD, role)
        event = ClockEvent(role, dict(self._clocks[role]))
        self._clocks[role][role] += 1
        return event

    def wait(self, role: str, event: ClockEvent) -> None:
        self._note(role, WAIT, event.role)
        self._join(role, event)

    def follow(self, role: str, other: str) -> None:
        self.wait(role, self.record(other))

    def free(self, role: str, *tasks: Callable[[], None]) -> None:
        """Of memory of `role`'s: in its order."""
        self.submit(role, *tasks)

    def allocate(self, flat: torch.Tensor) -> None:
        if storage_bytes(flat) > 0:
            return
        flat.untyped_storage().resize_(flat.numel() * flat.element_size())
        with torch._C._DisableTorchDispatch():
            flat.view(torch.uint8).fill_(0xFF)  # undefined contents: NaN in every floating dtype
        tracked = self._track(flat)
        tracked.home, tracked.undefined = self._role, [_span(flat)]
        self._touch(tracked, self._use_of(flat, ALLOCATE))

    def release(self, flat: torch.Tensor) -> None:
        if storage_bytes(flat) == 0:
            return
        tracked = self._track(flat)
        if tracked.home != self._role:
            raise RaceError(
                f"{self._role} releases {tracked.label}, which {tracked.home} allocated: its "
                "memory goes back to that role, in whose order this release is not"
            )
        self._touch(tracked, self._use_of(flat, RELEASE))
        tracked.uses.clear()  # what is allocated next is other memory, free of this past
        flat.untyped_storage().resize_(0)

    def synchronize(self) -> None:
        latest = {name: self._clocks[name][name] for name in self._clocks}
        for role, clock in self._clocks.items():
            clock.update(latest)
            clock[role] += 1

    def abandon(self) -> None:
        """Nothing: what is submitted has run."""

    def fetch(self, tensor: torch.Tensor) -> Callable[[], Any]:
        """Read by the present role, in its order: the host waits for an event behind that."""
        values = tensor.tolist()
        return lambda: values

    def host_memory(self, nbytes: int) -> torch.Tensor:
        with torch._C._DisableTorchDispatch():
            return torch.zeros(nbytes, dtype=torch.uint8)

    def block(self, event: ClockEvent) -> None:
        """Whatever is submitted from now on comes after it, on every role."""
        for role in self._clocks:
            self._join(role, event)

    def is_capturing(self) -> bool:
        return False

    # For the test.

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Checks every operation inside. RaceError where it happens, or on the way out for the
        end of a temporary."""
        with _Watcher(self):
            yield
        self._raise_late()

    def label(self, flat: torch.Tensor, name: str) -> None:
        """Gives the storage of `flat` a name in the log and in errors."""
        tracked = self._track(flat)
        tracked.label = name
        tracked.named = True

    def mark(self, what: str) -> None:
        """Writes a line of the test's own, on the present role."""
        self._note(self._role, MARK, what)

    # Bookkeeping.

    def _note(self, role: str, action: str, what: str, op: str = "", nbytes: int = 0) -> None:
        self.log.append(Entry(role, action, what, op, nbytes))

    def _join(self, role: str, event: ClockEvent) -> None:
        for name, epoch in event.clock.items():
            self._clocks[role][name] = max(self._clocks[role][name], epoch)

    def _track(self, tensor: torch.Tensor) -> _Tracked:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._storages:
            alive = weakref.ref(storage, lambda _: self._ended(key))
            self._storages[key] = _Tracked(self._role, alive)
        return self._storages[key]

    def _use_of(self, tensor: torch.Tensor, action: str, op: str = "") -> _Use:
        return _Use(self._role, self._clocks[self._role][self._role], action, op, _span(tensor))

    def _used(self, action: str, tensors: list[torch.Tensor], op: str) -> None:
        self._raise_late()
        for tensor in tensors:
            if tensor.numel() == 0:
                continue
            tracked = self._track(tensor)
            if storage_bytes(tensor) == 0:
                raise RaceError(
                    f"{self._role}: {op} {action} of {tracked.label}, which is released"
                )
            self._touch(tracked, self._use_of(tensor, action, op))

    def _touch(self, tracked: _Tracked, use: _Use) -> None:
        """Checks `use` against the uses that conflict with it, and remembers it."""
        if use.action == READ and any(_overlap(use.span, hole) for hole in tracked.undefined):
            raise RaceError(
                f"{use.role}: {use.op} read of {tracked.label}, allocated but not written yet: "
                f"bytes {tracked.undefined} of them, reading {use.span}"
            )
        for earlier in tracked.uses:
            conflict = not use.action == earlier.action == READ
            ordered = self._clocks[use.role][earlier.role] >= earlier.epoch
            if conflict and not ordered and _overlap(use.span, earlier.span):
                raise RaceError(
                    f"{use.role}: {use.op} {use.action} of {tracked.label} without waiting for "
                    f"{earlier.role}: {earlier.op} {earlier.action}"
                )
        tracked.remember(use)
        if use.action == WRITE:
            tracked.undefined = _without(tracked.undefined, use.span)
        if tracked.named:
            self._note(use.role, use.action, tracked.label, use.op, use.span[1] - use.span[0])

    def _ended(self, key: int) -> None:
        """A storage was freed. This runs in a destructor, where an exception would be lost."""
        tracked = self._storages.pop(key)
        for use in tracked.uses:
            if self._clocks[tracked.home][use.role] < use.epoch:
                self._late.append(
                    f"{tracked.label} ended on {tracked.home} without waiting for {use.role}: "
                    f"{use.op} {use.action}"
                )

    def _raise_late(self) -> None:
        if self._late:
            raise RaceError("; ".join(self._late))
