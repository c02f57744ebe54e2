"""Errors in terms of the model: the unit whose weights or gradients a failed collective carried,
and the buffer that did not fit.

A dead or late rank shows on the others as a collective that never ends. Where that can be proved,
all ranks raise one error within seconds (`core/comm/wait_watch.py`). Otherwise, with gloo, the wait
raises at the timeout, and the error is raised again with unit and phase. With NCCL the host waits
for nothing: the process group's own watchdog ends the process at the timeout, and torch's flight
recorder has its last collectives. Names are looked up only when something has failed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..core.comm.communicator import CommunicationError, Communicator, LaunchLog, Pair
from ..core.comm.wait_watch import WaitWatch
from ..core.comm.waits import Position
from ..core.engine.engine import FsdpEngine
from ..core.engine.hooks import in_backward

REDUCE = "reducing gradients"
BROADCAST = "broadcasting weights"
COMPARE = "comparing what the ranks have launched in this step"
ACTIONS: Mapping[str, str] = {
    "all_gather": "gathering weights",
    "reduce_scatter": REDUCE,
    "all_reduce": REDUCE,
    "all_to_all": REDUCE,
    "all_reduce_max": "agreeing on scales",
    "broadcast": BROADCAST,
}
"""Collective -> what the engine uses it for."""


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> float:
    """Seconds that a collective of `group` may take."""
    return group._get_backend(device).options._timeout.total_seconds()


class Launch(NamedTuple):
    """A collective that was launched, in words. One is made for every launch, so it does nothing
    that costs time."""

    action: str
    carries: str
    when: str
    ranks: Sequence[int]
    at: Position = (0, 0)

    def __str__(self) -> str:
        what = self.action
        if what != COMPARE:
            what += f" of {self.carries} {self.when}"
        return f"{what}, between ranks {self.ranks}"


@dataclass(frozen=True)
class NamedWork:
    """A handle of a collective. If it fails, or can never end, `wait` raises an error that says
    what it carried."""

    work: Any
    communicator: NamedCommunicator
    launch: Launch

    @property
    def log(self) -> LaunchLog | None:
        return self.communicator.log

    @property
    def at(self) -> Position:
        return self.launch.at

    def wait(self) -> None:
        watch = self.communicator.report.watch
        try:
            if watch is None:
                self.work.wait()
            else:
                watch.wait(self)
        except CommunicationError:
            raise
        except RuntimeError as error:
            raise self.communicator.failed(self, error) from error


class NamedCommunicator(Communicator):
    """A communicator whose errors name what it carries, in the words of `report`."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, report: FaultReport) -> None:
        super().__init__(group, device)
        self.report = report

    def failed(self, work: NamedWork, error: RuntimeError) -> CommunicationError:
        """The error that a launch, or the wait for it, failed with `error`."""
        watch = self.report.watch
        cause = watch.cause(self.ranks, work) if watch is not None else ""
        if cause:
            return CommunicationError(cause)
        # Looks the unit up only now, not at each launch.
        launch = work.launch._replace(carries=self.report.unit_of(work.launch.carries))
        return CommunicationError(
            f"rank {dist.get_rank()}: {launch}, failed: {error}. See the logs of the other ranks: "
            f"one has failed, is late by more than {timeout_of(self.group, self.device):g} s (the "
            "timeout of the process group), or took another path through the model"
        )

    def _position(self, compares: bool) -> Position:
        """The place of the launch that was noted last, or of the comparison behind a step."""
        log = self.log
        if log is None:
            return 0, 0
        if compares:
            return log.step - 1, log.before.count
        return log.step, log.launched.count - 1

    def launch(self, name: str, pairs: Sequence[Pair], **options: Any) -> list[Any]:
        if self.size == 1:
            return super().launch(name, pairs, **options)
        action = ACTIONS[name]
        when = "in backward" if in_backward() else "in forward"
        if action == BROADCAST:
            when = "at construction"
        elif name == "all_reduce_max" and not pairs[0][0].is_floating_point():
            action = COMPARE  # unlike scales, launches are compared as whole numbers
        at = self._position(compares=action == COMPARE)
        launch = Launch(action, self.carries, when, self.ranks, at)
        try:
            works = super().launch(name, pairs, **options)
        except RuntimeError as error:
            raise self.failed(NamedWork(None, self, launch), error) from error
        return [NamedWork(work, self, launch) for work in works]


def _size(nbytes: float) -> str:
    if nbytes < 2**20:
        return f"{nbytes:.0f} bytes"
    return f"{nbytes / 2**30:.3f} GiB"


REMEDY = (
    "Shard over more ranks, or more of the model (data_parallel_sharding_strategy), use smaller "
    "units (fsdp_unit_modules) or activation recompute; `megatron-fsdp-adapter "
    "estimate` predicts what fits"
)


class FaultReport:
    """Gives errors of one engine the names of its units and buffers. Holds the engine weakly.

    strategy: the name of the model's sharding strategy. watch: of waits, if there is one."""

    def __init__(self, strategy: str, watch: WaitWatch | None = None) -> None:
        self._strategy = strategy
        self.watch = watch
        # A weak reference. None before the engine is made, and when it is gone.
        self._engine: Callable[[], FsdpEngine | None] = lambda: None

    def communicator(self, group: dist.ProcessGroup, device: torch.device) -> NamedCommunicator:
        """A communicator for the engine."""
        return NamedCommunicator(group, device, self)

    def engine_made(self, engine: FsdpEngine) -> None:
        """Takes the names of buffers and launches from `engine` from now on."""
        self._engine = weakref.ref(engine)
        engine.runtime.on_out_of_memory = self.explain_allocation

    def unit_of(self, carries: str) -> str:
        """The unit, with its phase, that has the group named `carries`; `carries` itself if no
        group has this name."""
        engine = self._engine()
        if engine is None:
            return carries
        for unit in engine.units:
            if any(group.name == carries for group in unit.groups):
                return f"unit {unit.name} (phase {unit.phase.name})"
        return carries

    def explain_allocation(self, label: str, flat: torch.Tensor, error: RuntimeError) -> None:
        """Raises an error with the report for the buffer `flat`, which could not be given storage;
        returns if `error` is about something else."""
        size = _size(flat.numel() * flat.element_size())
        self._explain(f"{label} ({size}, {flat.dtype})", error)

    @contextmanager
    def building(self) -> Iterator[None]:
        """A context in which the engine is made: explains errors about memory."""
        try:
            yield
        except RuntimeError as error:
            self._explain("the buffers of the wrapper at construction", error)
            raise

    def _explain(self, what: str, error: RuntimeError) -> None:
        # Returns if `error` is not about memory.
        # Of allocators' errors, torch has a class for CUDA's, and none for the CPU's.
        on_cpu = "can't allocate memory" in str(error)
        if not on_cpu and not isinstance(error, torch.OutOfMemoryError):
            return
        raise type(error)(
            f"rank {dist.get_rank()}: no memory for {what} with the strategy {self._strategy}: "
            f"{error}\n{REMEDY}"
        ) from error
