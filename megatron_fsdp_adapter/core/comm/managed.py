"""Reductions over replicas that may die and come back, which torchft's manager reduces over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from .communicator import Communicator, Pair


class ReplicaRefused(RuntimeError):
    """This replica must not train with the others. The message says why, and what to do."""


class Manages(Protocol):
    """The methods of torchft's `Manager` that the engine calls."""

    def allreduce(self, tensor: torch.Tensor) -> Any:
        """Starts to replace `tensor` by its mean over the replicas of this step. Returns a handle,
        whose `wait` raises no error: an error makes `should_commit` False."""

    def wait_quorum(self) -> None:
        """Waits until it is known which replicas take part in this step."""

    def errored(self) -> Any:
        """The first error of this step, as `original_exception` of what it returns; or None."""


def raise_refusal(manager: Manages) -> None:
    """Raises the `ReplicaRefused` that was the first error of this step, if it was one."""
    found = manager.errored()
    error = None if found is None else found.original_exception
    if isinstance(error, ReplicaRefused):
        raise error


class ManagedCommunicator(Communicator):
    """Means over the replicas of a step, of which each has a rank with this one's shards. Replicas
    may differ from step to step, so it has neither a group nor ranks."""

    def __init__(self, manager: Manages, device: torch.device) -> None:
        self.manager = manager  # torchft's
        self.device = device
        # Not known before a step. It is never 1, so launches are noted also in a lone replica.
        self.size = 0
        self.ranks: list[int] = []
        # With an accelerator the manager's handles wait on the current stream.
        self.stream_ordered = device.type != "cpu"

    def launch(self, name: str, pairs: Sequence[Pair], **options: Any) -> list[Any]:
        """Launches means in place of sums. Returns the handles of those that are still running.

        Raises:
            ReplicaRefused: this replica differs from the others, so their shards do not fit.
        """
        assert name == "all_reduce" and not options, name
        self.manager.wait_quorum()
        raise_refusal(self.manager)
        works = [self.manager.allreduce(tensor) for tensor, _ in pairs]
        if not self.stream_ordered:
            return works
        for work in works:
            work.wait()
        return []
