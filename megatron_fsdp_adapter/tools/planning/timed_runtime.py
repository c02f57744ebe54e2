"""A recording runtime of the engine: the same interface, on tensors without memory.

The engine runs unchanged, on meta tensors. Each operation is recorded with its stream, its
dependencies by events and its host time. Every torch operation that moves many bytes is recorded as
a memory pass. Timing is a separate step, so that one program serves many machines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_fsdp_adapter.core.comm.communicator import Communicator, Pair
from megatron_fsdp_adapter.core.runtime.device import COMPUTE, Works

from .program import Kind, Operation, Program

SMALL = 1 << 14
"""Bytes below which an operation is not recorded; only its launch counts."""

CALL = 20.0
SWITCH = 100.0
LAUNCH = 8.0
"""Microseconds of the reference host: an event, or an allocation or release of a unit's memory;
work on another stream; a launch."""

VIEWS = ("view", "detach", "slice", "alias", "empty", "as_strided", "select", "expand", "split")
"""Name prefixes of operations that move no bytes."""


class TimedRuntime:
    """A `Runtime` on the meta device that records a `Program`."""

    host_waits = False
    poison = False

    def __init__(self) -> None:
        self.device = torch.device("meta")
        self.on_out_of_memory: Callable[[str, torch.Tensor, RuntimeError], None] = lambda *_: None
        self.part = ""  # of the step, for the next operations; its caller sets it
        self._role = COMPUTE  # the stream that the next operation runs on
        self._operations: list[Operation] = []
        # Of each stream: the number of its last operation, and those that the next one waits for.
        self._last: dict[str, int] = {}
        self._waits: dict[str, set[int]] = {}
        self._host = 0.0  # microseconds since the last operation was launched
        self._marks: list[tuple[str, int]] = []

    @property
    def program(self) -> Program:
        """The program recorded so far."""
        return Program(tuple(self._operations), tuple(self._marks))

    def mark(self, name: str) -> None:
        """Adds a mark at the current place in the program."""
        self._marks.append((name, len(self._operations)))

    def spend(self, microseconds: float) -> None:
        """Adds host time before the next operation."""
        self._host += microseconds

    def write(self, kind: Kind, amount: float, **given: Any) -> None:
        """Records an operation on the current stream. given: further fields of `Operation`. No-op
        without an amount."""
        if amount <= 0:
            return
        role = self._role
        part = given.pop("part", self.part)
        after = tuple(sorted(self._waits.pop(role, set())))
        host = self._host + LAUNCH
        operation = Operation(role, kind, amount, part, after, host=host, **given)
        self._host = 0.0
        self._last[role] = len(self._operations)
        self._operations.append(operation)

    def sum_rows(
        self, rows: torch.Tensor, output: torch.Tensor, scale: float, accumulate: bool
    ) -> None:
        """Records one memory pass in place of the kernel of `all_to_all_sum`."""
        accesses = 2 if accumulate else 1  # the output is read, too
        self.write(Kind.MEMORY, rows.nbytes + output.nbytes * accesses)

    # The engine's interface.

    def submit(self, role: str, *tasks: Callable[[], Works]) -> None:
        before = self._role
        self._role = role
        if role != COMPUTE:
            self.spend(SWITCH)
        try:
            for task in tasks:
                task()
        finally:
            self._role = before

    launch = submit

    def record(self, role: str) -> tuple[int, ...]:
        self.spend(CALL)
        found = set(self._waits.get(role, ()))
        if role in self._last:
            found.add(self._last[role])
        return tuple(found)

    def wait(self, role: str, event: Sequence[int]) -> None:
        self.spend(CALL)
        self._waits.setdefault(role, set()).update(event)

    def follow(self, role: str, other: str) -> None:
        self.wait(role, self.record(other))

    def free(self, role: str, *tasks: Callable[[], None]) -> None:
        for task in tasks:
            task()

    def allocate(self, flat: torch.Tensor) -> None:
        if flat.untyped_storage().nbytes() == 0:
            self.spend(CALL)
            flat.untyped_storage().resize_(flat.numel() * flat.element_size())

    def release(self, flat: torch.Tensor) -> None:
        if flat.untyped_storage().nbytes():
            self.spend(CALL)
        flat.untyped_storage().resize_(0)

    def synchronize(self, event: Any = None) -> None:
        """No-op: nothing runs asynchronously."""

    abandon = synchronize
    block = synchronize

    def fetch(self, tensor: torch.Tensor) -> Callable[[], Any]:
        """A function that returns a result by which all ranks agree: the launch comparison reads a
        number and its complement in each row."""
        return lambda: [[0, ~0]] * tensor.shape[0]

    def host_memory(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="meta")

    def is_capturing(self) -> bool:
        return False


class Watch(TorchDispatchMode):
    """Records operations of torch inside the block: a memory pass for each that moves many bytes,
    else the host's time to launch it."""

    def __init__(self, runtime: TimedRuntime) -> None:
        super().__init__()
        self._runtime = runtime

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[-1].lstrip("_")
        if not name.startswith(VIEWS):
            moved = _bytes_moved(name, args, out)
            if moved >= SMALL:
                self._runtime.write(Kind.MEMORY, moved)
            else:
                self._runtime.spend(LAUNCH)
        return out


def _bytes_moved(name: str, args: Any, out: Any) -> int:
    """Bytes that an operation reads and writes."""
    read = _bytes_of(args)
    # Its arguments include the tensors that it overwrites, and does not read.
    if name.startswith(("fill", "zero", "foreach_zero", "copy", "foreach_copy")):
        return read
    written = out
    if name.startswith("foreach") and not _tensors_in(out):
        written = args[0]
    return read + _bytes_of(written)


def _tensors_in(tree: Any) -> list[torch.Tensor]:
    return [one for one in tree_leaves(tree) if isinstance(one, torch.Tensor)]


def _bytes_of(tree: Any) -> int:
    return sum(one.numel() * one.element_size() for one in _tensors_in(tree))


KINDS = {
    "all_gather": Kind.ALL_GATHER,
    "reduce_scatter": Kind.REDUCE_SCATTER,
    "all_reduce": Kind.ALL_REDUCE,
    "all_reduce_max": Kind.ALL_REDUCE,
    "all_to_all": Kind.EXCHANGE,
}
"""Name of a collective -> its kind, for those of a step. Others are not recorded."""


class TimedCommunicator(Communicator):
    """A `Communicator` that records its collectives.

    axis: name of its group in `configurations.groups`. channel: collectives of one channel are
    sequential, as in an NCCL communicator. copy_engine: True if all-gathers and exchanges run on
    copy engines.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        runtime: TimedRuntime,
        axis: str,
        channel: str,
        copy_engine: bool = False,
    ) -> None:
        self.group = group
        self.device = runtime.device
        self._runtime = runtime
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        self.ranks = dist.get_process_group_ranks(group)
        self._axis = axis
        self._channel = channel
        self._copy_engine = copy_engine

    def launch(self, name: str, pairs: Sequence[Pair], **options: Any) -> list[Any]:
        kind = KINDS.get(name)
        if kind is None or self.size == 1:
            return []
        nbytes = 0
        for output, source in pairs:
            whole = output if kind is Kind.ALL_GATHER else source
            nbytes += whole.nbytes
        copied = self._copy_engine and kind in (Kind.ALL_GATHER, Kind.EXCHANGE)
        self._runtime.write(
            kind, nbytes, group=self._axis, channel=self._channel, copy_engine=copied
        )
        return []

    def all_objects(self, value: Any) -> dict[int, Any]:
        return {self.rank: value}
