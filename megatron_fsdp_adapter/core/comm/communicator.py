"""Collectives over one process group, what each backend can do, and the log of what was launched.

A `Communicator` launches on whatever stream is current and returns the handles that are still
running. NCCL enqueues on the current stream, so there are none; gloo runs in the background and
returns one handle a call, which the host runtime waits for.

The lists that the methods take are the segments of a unit: one launch covers them all.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager

Pair = tuple[torch.Tensor, torch.Tensor]


class CommunicationError(RuntimeError):
    """A collective of the wrapper failed, or can never end. The message says what it carried, and
    between which ranks."""


STREAM_ORDERED = {"nccl": True, "gloo": False}
"""The known backends. True: the current stream orders their collectives, so that the host need not
wait, and several of them can share one launch."""

# torch 2.13 renames the flat collectives and warns on the old names; 2.11 has only the old ones.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter: Callable[..., Any] = getattr(
    dist, "reduce_scatter_single", dist.reduce_scatter_tensor
)


def _broadcast(pair: Pair, group: dist.ProcessGroup, **how: Any) -> Any:
    return dist.broadcast(pair[0], dist.get_global_rank(group, 0), group, **how)


COLLECTIVES: Mapping[str, Callable[..., Any]] = {
    "all_gather": lambda pair, **how: _all_gather(*pair, **how),
    "reduce_scatter": lambda pair, **how: _reduce_scatter(*pair, **how),
    "all_reduce": lambda pair, **how: dist.all_reduce(pair[0], **how),
    "all_reduce_max": lambda pair, **how: dist.all_reduce(pair[0], dist.ReduceOp.MAX, **how),
    "all_to_all": lambda pair, **how: dist.all_to_all_single(*pair, **how),
    "broadcast": _broadcast,
}
"""Method name -> the collective that launches one pair."""


def is_stream_ordered(group: dist.ProcessGroup, device: torch.device) -> bool:
    """True if the current stream orders the collectives of `group` on `device`. Raises ValueError
    if its backend for that device is unknown."""
    # "cpu:gloo,cuda:nccl", also where no backend was named: `get_backend` is "undefined" then.
    config = dist.get_backend_config(group)
    backends = dict(part.split(":") for part in config.split(","))
    backend = backends.get(device.type)
    if backend in STREAM_ORDERED:
        return STREAM_ORDERED[backend]
    raise ValueError(
        f"process group backend={config!r} has no known collectives for device {device.type!r}. "
        f"Use one of {sorted(STREAM_ORDERED)}"
    )


class Communicator:
    """Flat collectives of one group.

    A group of one rank launches nothing: its gather and its reduction are the identity, in place.
    """

    carries = ""
    """The name of what the next collectives carry, for messages about their failure."""
    log: LaunchLog | None = None
    """The log that notes the next collectives; None before the first one that is noted."""
    averages = False
    """True if a reduce-scatter can divide sums by the number of ranks, at no cost."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = group
        self.device = device
        self.size: int = dist.get_world_size(group)
        self.rank: int = dist.get_rank(group)  # in the group
        self.ranks = dist.get_process_group_ranks(group)  # global ones
        self.stream_ordered = is_stream_ordered(group, device)
        self.averages = self.stream_ordered and self.size > 1

    def launch(self, name: str, pairs: Sequence[Pair], **options: Any) -> list[Any]:
        """Launches the collective of that name with each pair. Returns the handles of those that
        are still running. All methods below call this one, so that it alone has to be replaced by
        code that names, times or pretends collectives."""
        if self.size == 1:
            for output, source in pairs:
                if output.data_ptr() != source.data_ptr():
                    output.copy_(source)
            return []
        run = functools.partial(COLLECTIVES[name], group=self.group, **options)
        if not self.stream_ordered:
            return [run(pair, async_op=True) for pair in pairs]
        together: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if len(pairs) > 1:
            together = _coalescing_manager(group=self.group, device=self.device, async_ops=False)
        with together:
            for pair in pairs:
                run(pair, async_op=False)
        return []

    def all_gather(self, pairs: Sequence[Pair]) -> list[Any]:
        """Gathers each pair of (output of n * size elements, input of n elements); the input may be
        this rank's slice of the output."""
        return self.launch("all_gather", pairs)

    def reduce_scatter(self, pairs: Sequence[Pair], average: bool = False) -> list[Any]:
        """Sums, which an `average` divides by the number of ranks, if that `averages`. Each pair is
        (output of n elements, input of n * size elements); the output may be this rank's slice of
        the input.

        NCCL could scale by other factors (PREMUL_SUM), but torch 2.11 then multiplies bf16 by zero.
        """
        options = {"op": dist.ReduceOp.AVG} if average else {}
        return self.launch("reduce_scatter", pairs, **options)

    def all_to_all(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        received: Sequence[int] = (),
        sent: Sequence[int] = (),
    ) -> list[Any]:
        """Sends each rank its piece of the flat `source`, and receives theirs into `output`.

        sent, received: elements of the piece to, and from, each rank. If both are empty, all pieces
            are equal.
        """
        sizes = {"output_split_sizes": list(received), "input_split_sizes": list(sent)}
        return self.launch("all_to_all", [(output, source)], **sizes)

    def all_reduce(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
        """Sums each flat tensor in place."""
        return self.launch("all_reduce", [(tensor, tensor) for tensor in tensors])

    def all_reduce_max(self, tensor: torch.Tensor) -> list[Any]:
        """Replaces each element of the flat tensor by the largest over the ranks."""
        return self.launch("all_reduce_max", [(tensor, tensor)])

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Overwrites `tensor` with that of the group's first rank. Returns when that is enqueued
        (NCCL) or done (gloo)."""
        for work in self.launch("broadcast", [(tensor, tensor)]):
            work.wait()

    def all_objects(self, value: Any) -> dict[int, Any]:
        """Every rank's `value`, which can be pickled, by global rank. Waits for the device."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self.group)
        return dict(zip(self.ranks, found, strict=True))


KEPT = 20_000
"""The last launches of a step, so many, are kept in words to name the first difference: 160 kB."""

_MASK = (1 << 64) - 1
_PRIME = 0x100000001B3


@dataclass
class Launched:
    """The launches of one rank in a step."""

    # How many.
    count: int = 0
    # The number that they are folded into; 64 bits.
    folded: int = 0
    # The latest ones in words.
    latest: deque[str] = field(default_factory=lambda: deque(maxlen=KEPT))

    def add(self, text: str, code: int) -> None:
        self.count += 1
        self.folded = ((self.folded * _PRIME) ^ code) & _MASK
        self.latest.append(text)

    def text_of(self, index: int) -> str:
        """The launch with that number, from 0, in words."""
        if index >= self.count:
            return "nothing more"
        place = index - (self.count - len(self.latest))
        return self.latest[place] if place >= 0 else "no longer remembered"


class Carried(Protocol):
    """A group whose weights or gradients a collective carries."""

    name: str


class LaunchLog:
    """The launches of an engine in the step that runs, and in the one before. Another thread reads
    it."""

    def __init__(self) -> None:
        self.step = 0  # the number of the step that runs, from 0
        self.launched = Launched()  # in that step
        self.before = Launched()  # in the step before
        # The text of the error that ranks wait for each other; "" until that is known.
        self.failed = ""
        # Words and code of launches, by kind and name of the group.
        self._known: dict[tuple[str, str], tuple[str, int]] = {}

    def note(self, kind: str, groups: Sequence[Carried], communicator: Communicator) -> None:
        """Notes that a collective of `kind`, which carries `groups`, is launched now.

        Raises:
            CommunicationError: ranks wait for each other (`core/comm/wait_watch.py`).
        """
        communicator.carries = groups[0].name
        if communicator.size == 1:
            return
        if self.failed:
            raise CommunicationError(self.failed)
        communicator.log = self
        for group in groups:
            key = (kind, group.name)
            known = self._known.get(key)
            if known is None:
                text = kind.format(group.name)
                digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
                known = text, int.from_bytes(digest, "big")
                self._known[key] = known
            self.launched.add(*known)

    def end_step(self) -> None:
        """The step ends: the next launch belongs to another one."""
        self.before = self.launched
        self.launched = Launched()
        self.step += 1


@dataclass(frozen=True)
class Reduce:
    """A way to reduce gradients over the shard axis of a domain.

    Attributes:
        launch: takes a communicator, and the `Reduction`s of groups that one launch reduces.
            Returns the handles that are still running.
        finishes: it does itself what is done after others (`Reduction.finish`): scales the sums, in
            float32, and puts them into the main gradients, or adds them to those. Others leave the
            sums in the outputs of `Reduction`.
        fixed: it receives the pieces of a bucket that is in a slot into a fixed buffer.
    """

    name: str
    launch: Callable[[Communicator, Sequence[Any]], list[Any]] = field(repr=False)
    finishes: bool = False
    fixed: bool = False


def _reduce_all(communicator: Communicator, parts: Sequence[Any]) -> list[Any]:
    segments = []
    for part in parts:
        segments += part.segments
    return communicator.all_reduce(segments)


def _scatter_all(
    communicator: Communicator, parts: Sequence[Any], average: bool = False
) -> list[Any]:
    pairs = []
    for part in parts:
        pairs += part.pairs
    return communicator.reduce_scatter(pairs, average)


ALONE = Reduce("alone", lambda communicator, parts: [])
"""One rank has everything, which is scaled where it lies."""
ALL_REDUCE = Reduce("all_reduce", _reduce_all)
REDUCE_SCATTER = Reduce("reduce_scatter", _scatter_all)
AVERAGE = Reduce("average", functools.partial(_scatter_all, average=True))
"""A reduce-scatter of communicators that can average."""
