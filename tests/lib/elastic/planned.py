"""A stand-in for torchft's manager, for replicas of one job. A plan says what happens in each
attempt at a step, so that a run with failures can be repeated without them.

It has the methods of `Manager` of torchft 0.2.0 that this package and its users call, with their
arguments (`test_stand_in_has_torchfts_signatures`)."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp


@dataclass(frozen=True)
class Attempt:
    """An attempt at a step."""

    # Numbers of the replicas whose gradients count.
    replicas: Collection[int]
    # What the sum of these is divided by; 0 for their number.
    divisor: int = 0
    # Whether a reduction fails in it.
    fails: bool = False
    # Numbers of the replicas that join in it: they take over the state of `source`.
    joins: Collection[int] = ()
    source: int = 0


@dataclass
class Failure:
    """An error, as torchft's `ExceptionWithTraceback` has it."""

    original_exception: Exception


class Done:
    """A handle of a reduction that has ended."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True


class PlannedManager:
    """The manager of a rank of replica number `replica`. Replicas that take no part in an attempt
    run it all the same, and their gradients count as zero.

    group: the same rank of all replicas, in their order.
    """

    def __init__(self, group: dist.ProcessGroup, replica: int, plan: Sequence[Attempt]) -> None:
        self.group = group
        self._replica = replica
        self._plan = plan
        # The number of the attempt; -1 before the first.
        self._number = -1
        self._step = 0
        self._error: Failure | None = None
        self._states: dict[str, tuple[Callable[[Any], None], Callable[[], Any]]] = {}
        # What was called, by name, in this attempt.
        self.calls: list[str] = []
        # The seconds that reductions of each attempt may take, if they were set.
        self.limits: list[float] = []
        # In the place of the process group, which counts quorums.
        self._pg = SimpleNamespace(
            quorums=0, set_timeout=lambda limit: self.limits.append(limit.total_seconds())
        )

    @property
    def attempt(self) -> Attempt:
        return self._plan[self._number]

    def register_state_dict_fn(
        self,
        key: str,
        load_state_dict: Callable[[Any], None],
        state_dict: Callable[[], Any],
    ) -> None:
        assert key not in self._states
        self._states[key] = (load_state_dict, state_dict)

    def start_quorum(
        self,
        allow_heal: bool = True,
        shrink_only: bool = False,
        timeout: timedelta | None = None,
    ) -> None:
        self._number += 1
        self._pg.quorums += 1
        self._error = None
        self.calls = []
        if self.attempt.joins:
            self._heal()

    def _heal(self) -> None:
        # As a transport of torchft's: pickled, from the same rank of another replica.
        box: list[Any] = [None]
        if self._replica == self.attempt.source:
            box = [pickle.dumps({key: save() for key, (_, save) in self._states.items()})]
        source = dist.get_global_rank(self.group, self.attempt.source)
        dist.broadcast_object_list(box, source, self.group)
        if self._replica in self.attempt.joins:
            try:
                received = pickle.loads(box[0])
            except Exception as error:  # as torchft: the step goes on, and fails
                self.report_error(error)
                return
            for key, (load, _) in self._states.items():
                load(received[key])

    def wait_quorum(self) -> None:
        assert self._number >= 0, "must call start_quorum before wait_quorum"

    def num_participants(self) -> int:
        return self.attempt.divisor or len(self.attempt.replicas)

    def participating_rank(self) -> int | None:
        here = sorted(self.attempt.replicas)
        return here.index(self._replica) if self._replica in here else None

    def is_participating(self) -> bool:
        return self._replica in self.attempt.replicas

    def allreduce(
        self,
        tensor: torch.Tensor,
        should_quantize: bool = False,
        reduce_op: ReduceOp = ReduceOp.AVG,
    ) -> Done:
        self.calls.append("allreduce")
        assert not should_quantize and reduce_op == ReduceOp.AVG
        if not self.is_participating():
            tensor.zero_()
        dist.all_reduce(tensor, group=self.group)
        tensor /= self.num_participants()
        if self.attempt.fails:
            tensor.fill_(torch.nan)
            self.report_error(RuntimeError("connection closed by peer"))
        return Done()

    def report_error(self, e: Exception) -> None:
        self._error = Failure(e)

    def errored(self) -> Failure | None:
        return self._error

    def should_commit(self, timeout: timedelta | None = None) -> bool:
        self.calls.append("should_commit")
        if self._error is not None:
            return False
        self._step += 1
        return True

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self._step = state_dict["step"]

    def current_step(self) -> int:
        return self._step

    def shutdown(self, wait: bool = True) -> None:
        self.calls.append("shutdown")
