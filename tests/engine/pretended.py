"""A world of which one rank exists, and communicators that do what the others would.

Checked against `core/runtime/comm.py`, and c10d of torch 2.13. Others send what this one sends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def pretended_world(size: int, rank: int = 0) -> Iterator[None]:
    """A default process group of `size` ranks of which only this one exists."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


class PretendCommunicator:
    """`Communicator` whose other ranks hold the weights that the model began with, and send the
    gradients that this one does.

    `initial` maps a gather's output to its contents at the beginning. `report` is told the name
    of each collective and its tensors before it runs.
    """

    def __init__(
        self,
        group: Any,
        initial: Callable[[torch.Tensor], torch.Tensor],
        report: Callable[[str, Sequence[torch.Tensor]], None],
    ) -> None:
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.ranks = dist.get_process_group_ranks(group)
        self.initial, self.report = initial, report

    def _check(self, whole: torch.Tensor, part: torch.Tensor, parts: int | None = None) -> None:
        """What c10d of torch 2.13 demands of the flat collectives, and NCCL of its memory."""
        count = self.size if parts is None else parts
        assert whole.numel() == part.numel() * count, (whole.shape, part.shape, count)
        assert whole.is_contiguous() and part.is_contiguous()
        assert whole.dtype == part.dtype, (whole.dtype, part.dtype)

    def all_gather(self, pairs: Any) -> list[Any]:
        self.report("all_gather", [pair[0] for pair in pairs])
        for output, own in pairs:
            self._check(output, own)
            pieces = list(self.initial(output).chunk(self.size))
            pieces[self.rank] = own.clone()  # a real one reads it, in place or not
            for shard, piece in zip(output.chunk(self.size), pieces, strict=True):
                if shard.data_ptr() != own.data_ptr():
                    shard.copy_(piece)
        return []

    def reduce_scatter(self, pairs: Any) -> list[Any]:
        self.report("reduce_scatter", [pair[1] for pair in pairs])
        for output, full in pairs:
            self._check(full, output)
            output.copy_(full.chunk(self.size)[self.rank] * self.size)
        return []

    def all_to_all(self, output: torch.Tensor, source: torch.Tensor) -> list[Any]:
        self.report("all_to_all", [source])
        self._check(output, source, parts=1)
        own = source.view(self.size, -1)[self.rank]
        output.view(self.size, -1).copy_(own.expand(self.size, -1))
        return []

    def all_reduce(self, tensors: Any) -> list[Any]:
        self.report("all_reduce", tensors)
        for tensor in tensors:
            tensor.mul_(self.size)
        return []

    def all_reduce_max(self, tensor: torch.Tensor) -> list[Any]:
        tensor.mul_(1)
        return []

    def broadcast(self, tensor: torch.Tensor) -> None:
        tensor.mul_(1)


class Work:
    """A collective that happens only when somebody waits for it."""

    def __init__(self, effect: Callable[[], Any]) -> None:
        self._effect: Callable[[], Any] | None = effect

    def wait(self) -> None:
        if self._effect is not None:
            effect, self._effect = self._effect, None
            effect()


class LateCommunicator(PretendCommunicator):
    """Does nothing until the work is waited for: the slowest network there can be."""

    def all_gather(self, pairs: Any) -> list[Any]:
        return [Work(lambda: super(LateCommunicator, self).all_gather(pairs))]

    def reduce_scatter(self, pairs: Any) -> list[Any]:
        return [Work(lambda: super(LateCommunicator, self).reduce_scatter(pairs))]

    def all_to_all(self, output: torch.Tensor, source: torch.Tensor) -> list[Any]:
        return [Work(lambda: super(LateCommunicator, self).all_to_all(output, source))]

    def all_reduce(self, tensors: Any) -> list[Any]:
        return [Work(lambda: super(LateCommunicator, self).all_reduce(tensors))]
