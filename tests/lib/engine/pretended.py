"""A world of which one rank exists, and communicators that do what the others would.

Checked against `core/comm/communicator.py`, and c10d of torch 2.13. Others send what this one
sends.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_fsdp_adapter.core.comm.communicator import Communicator, Pair


@contextmanager
def pretended_world(size: int, rank: int = 0) -> Iterator[None]:
    """A default process group of `size` ranks of which only this one exists."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


REPORTED = {"all_gather": 0, "reduce_scatter": 1, "all_reduce": 1, "all_to_all": 1}
"""Collectives that tests hear of, by the place of the whole tensor in a pair."""


class PretendCommunicator(Communicator):
    """`Communicator` whose other ranks hold the weights that the model began with, and send the
    gradients that this one does.

    `initial` maps a gather's output to its contents at the beginning. `report` gets the name
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
        self.initial = initial
        self.report = report

    def launch(self, name: str, pairs: Sequence[Pair], **options: Any) -> list[Any]:
        if name in REPORTED:
            self.report(name, [pair[REPORTED[name]] for pair in pairs])
        for output, source in pairs:
            getattr(self, f"_{name}")(output, source)
        return []

    def _check(self, whole: torch.Tensor, part: torch.Tensor, parts: int | None = None) -> None:
        """What c10d of torch 2.13 demands of the flat collectives, and NCCL of its memory."""
        count = self.size if parts is None else parts
        assert whole.numel() == part.numel() * count, (whole.shape, part.shape, count)
        assert whole.is_contiguous()
        assert part.is_contiguous()
        assert whole.dtype == part.dtype, (whole.dtype, part.dtype)

    def _all_gather(self, output: torch.Tensor, own: torch.Tensor) -> None:
        self._check(output, own)
        pieces = list(self.initial(output).chunk(self.size))
        pieces[self.rank] = own.clone()  # a real one reads it, in place or not
        for shard, piece in zip(output.chunk(self.size), pieces, strict=True):
            if shard.data_ptr() != own.data_ptr():
                shard.copy_(piece)

    def _reduce_scatter(self, output: torch.Tensor, full: torch.Tensor) -> None:
        self._check(full, output)
        output.copy_(full.chunk(self.size)[self.rank] * self.size)

    def _all_to_all(self, output: torch.Tensor, source: torch.Tensor) -> None:
        self._check(output, source, parts=1)
        own = source.view(self.size, -1)[self.rank]
        output.view(self.size, -1).copy_(own.expand(self.size, -1))

    def _all_reduce(self, tensor: torch.Tensor, same: torch.Tensor) -> None:
        tensor.mul_(self.size)

    def _all_reduce_max(self, tensor: torch.Tensor, same: torch.Tensor) -> None:
        tensor.mul_(1)

    _broadcast = _all_reduce_max


class LateCommunicator(PretendCommunicator):
    """Does nothing until the work is waited for: the slowest network there can be."""

    def launch(self, name: str, pairs: Sequence[Pair], **options: Any) -> list[Any]:
        effect = functools.partial(super().launch, name, pairs, **options)
        if name not in REPORTED:
            return effect()
        return [SimpleNamespace(wait=functools.cache(effect))]
