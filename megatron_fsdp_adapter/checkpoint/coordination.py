"""Coordination of ranks: every step of a save or load succeeds on all ranks or raises on all.

A rank that fails alone would leave the others waiting in the next collective. So each step ends
with one exchange of small objects that carry results or failures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException

from megatron_fsdp_adapter.core.problems import RefusedByAllRanks

T = TypeVar("T")
R = TypeVar("R")


class CheckpointError(RuntimeError):
    """Raised on every rank if a save or load fails on a rank, but not because of invalid input.

    Examples:
        >>> issubclass(CheckpointError, RuntimeError)
        True
    """


# The errors that a step may raise on any rank, most specific first.
_KINDS: tuple[type[Exception], ...] = (
    FileNotFoundError,
    RefusedByAllRanks,
    ValueError,
    CheckpointError,
)


@dataclass(frozen=True)
class Coordinator:
    """The ranks that save or load together.

    group: a process group with a CPU backend; rank: of this process in it; size: of the group.
    """

    group: dist.ProcessGroup
    rank: int
    size: int

    @staticmethod
    def of(group: dist.ProcessGroup) -> Coordinator:
        """The coordinator of this process in `group`."""
        return Coordinator(group, dist.get_rank(group), dist.get_world_size(group))

    def run(
        self, stage: str, step: Callable[[], T], share: Callable[[T], R | None] = lambda _: None
    ) -> tuple[T, tuple[R | None, ...]]:
        """Runs `step` here; returns its result, and `share(result)` of every rank in rank order.

        If it raised on any rank, every rank raises one error that quotes each different message
        with its ranks: FileNotFoundError or ValueError if a rank raised that, else CheckpointError.
        A rank that was interrupted raises that. One all_gather_object either way.
        """
        cause: BaseException | None = None
        shared: R | None = None
        failure: tuple[int, str] | None = None
        try:
            result = step()
            shared = share(result)
        except (Exception, CheckpointException) as error:
            cause = error
            failure = _kind_of(error), message_of(error)
        results: list[Any] = [None] * self.size
        dist.all_gather_object(results, (shared, failure), group=self.group)
        kinds = []
        messages = {}
        for rank, (_, failed) in enumerate(results):
            if failed:
                kind, messages[rank] = failed
                kinds.append(kind)
        if messages:
            together = _common_kind(kinds)(_report(stage, messages, self.size))
            raise interruption_in(cause, self.rank) or together from cause
        return result, tuple(value for value, _ in results)


@contextmanager
def coordination(group: dist.ProcessGroup | None = None) -> Iterator[Coordinator]:
    """The coordinator of `group`, or of all ranks if it is None.

    A default group without a CPU backend (plain NCCL) is not used: the small Python objects would
    be copied to the GPU and would queue behind the communication of training. A gloo group is then
    created for the duration (a collective call on all ranks) and destroyed; pass `group` to avoid
    that. Raises ValueError if torch.distributed is not initialized or `group` has no CPU backend.
    """
    if group is not None and not _has_cpu_backend(group):
        raise ValueError(
            f"group has backend {dist.get_backend(group)!r}, which cannot move CPU tensors. Pass "
            "a gloo group, or None to create one"
        )
    chosen = dist.group.WORLD if group is None else group
    temporary = not _has_cpu_backend(chosen)
    if temporary or chosen is None:  # None only for the type checker
        chosen = dist.new_group(backend="gloo")
    try:
        yield Coordinator.of(chosen)
    finally:
        if temporary:
            dist.destroy_process_group(chosen)


def _has_cpu_backend(group: dist.ProcessGroup | None) -> bool:
    return "cpu:" in dist.get_backend_config(group)


def _kind_of(error: BaseException) -> int:
    # The index in `_KINDS` of the error that ranks raise for `error`.
    for i, kind in enumerate(_KINDS):
        if isinstance(error, kind):
            return i
    return len(_KINDS) - 1


def _common_kind(kinds: Sequence[int]) -> type[Exception]:
    """The error that every rank raises: the first of those that ranks have raised. One that is
    printed without a traceback only if they have raised no other, which may be a fault of code."""
    kind = _KINDS[min(kinds)]
    if kind is RefusedByAllRanks and len(set(kinds)) > 1:
        return ValueError
    return kind


def interruption_in(error: BaseException | None, rank: int) -> BaseException | None:
    """The SystemExit or KeyboardInterrupt of this rank in an error of torch DCP, which wraps these
    as it wraps errors. None if it has none. A signal handler may raise them."""
    if not isinstance(error, CheckpointException) or rank not in error.failures:
        return None
    cause, _ = error.failures[rank]
    return cause if isinstance(cause, (SystemExit, KeyboardInterrupt)) else None


def message_of(error: BaseException) -> str:
    """The message of an error; of an error of several ranks, each message with its ranks."""
    if isinstance(error, CheckpointException):
        messages = {rank: message_of(why) for rank, (why, _) in sorted(error.failures.items())}
        return "; ".join(_by_ranks(messages))
    # The arguments of OSError are (errno, text, file) when the system raised it.
    if isinstance(error, _KINDS) and len(error.args) == 1:
        return str(error)
    return f"{type(error).__name__}: {error}"


def _by_ranks(messages: Mapping[int, str]) -> list[str]:
    """Distinct messages, each with the ranks that it comes from in front."""
    ranks_of: dict[str, list[str]] = {}
    for rank, message in messages.items():
        ranks_of.setdefault(message, []).append(str(rank))
    return [f"rank {', '.join(ranks)}: {message}" for message, ranks in ranks_of.items()]


def _report(stage: str, messages: Mapping[int, str], size: int) -> str:
    # The message of the common error: the message itself if all `size` ranks have the same.
    different = set(messages.values())
    if len(different) == 1 and len(messages) == size:
        return different.pop()
    head = f"{stage} failed on {len(messages)} of {size} ranks:"
    return "\n  ".join([head, *_by_ranks(messages)])
