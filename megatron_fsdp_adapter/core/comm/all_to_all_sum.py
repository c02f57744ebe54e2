"""A reduce-scatter with sums in float32: an all-to-all, after which each rank adds up what it got.

An all-to-all puts as many bytes on the wire as a ring reduce-scatter. Copy engines can carry it,
from one fixed buffer to another. The sum is in the order of the ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from ..kernels.sums import SumRows, sum_rows
from .communicator import Communicator, Pair, Reduce


class GroupReduction(Protocol):
    """The fields of the engine's `Reduction` that are read here: the reduction of one group."""

    reduce: Any
    """Has `after`, the factor on the sums."""
    segments: Sequence[torch.Tensor]
    adds: bool

    @property
    def main(self) -> Sequence[torch.Tensor]: ...

    def receive(self, segment: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True)
class SumsOfReceived:
    """A handle of an exchange: its `wait` also adds up what the ranks sent. works: handles of the
    exchange itself."""

    works: Sequence[Any]
    add_up: Callable[[], None]

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        self.add_up()


def reduce_scatter(
    communicator: Communicator,
    pairs: Sequence[Pair],
    scale: float = 1.0,
    accumulate: bool = False,
    receive: Callable[[torch.Tensor], torch.Tensor] = torch.empty_like,
    sum_rows: SumRows = sum_rows,
) -> list[Any]:
    """Sums the inputs of all ranks in float32, times `scale`. Inputs are sent in their own dtype.

    pairs: (output of n elements, input of n * size elements). The output may be this rank's slice
        of the input.
    accumulate: the sums are added to what the outputs hold.
    receive: gives memory for the pieces that come from all ranks, from the input that is sent.

    Each pair is a launch of its own: all-to-alls do not coalesce.
    """
    works = []
    for output, source in pairs:
        received = receive(source)
        exchange = communicator.all_to_all(received, source)
        rows = received.view(communicator.size, -1)
        add_up = functools.partial(sum_rows, rows, output, scale, accumulate)
        if exchange:
            works.append(SumsOfReceived(exchange, add_up))
        else:  # the current stream orders it
            add_up()
    return works


def launch(
    communicator: Communicator, parts: Sequence[GroupReduction], sum_rows: SumRows = sum_rows
) -> list[Any]:
    """`reduce_scatter` of each part, into the main gradients."""
    works = []
    for part in parts:
        pairs = list(zip(part.main, part.segments, strict=True))
        works += reduce_scatter(
            communicator, pairs, part.reduce.after, part.adds, part.receive, sum_rows
        )
    return works


ALL_TO_ALL_SUM = Reduce("all_to_all_sum", launch, finishes=True)
FIXED_ALL_TO_ALL_SUM = replace(ALL_TO_ALL_SUM, name="fixed_all_to_all_sum", fixed=True)
