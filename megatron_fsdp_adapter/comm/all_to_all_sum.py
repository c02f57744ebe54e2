"""A reduce-scatter in float32: an all-to-all, after which each rank adds up what it got.

An all-to-all puts as many bytes on the wire as a ring reduce-scatter. Copy engines can carry it,
from one fixed buffer to another. The sum is in the order of the ranks.

On CUDA a Triton kernel reads every piece once and writes, or adds to, the shard: one pass, in
float32, in the order of the ranks. Torch's own reduction over a first dimension of 2 to 8 rows
moves 2.0 to 3.9 TB/s of an H200's 4.3, and adding its result to the shard is one pass more: for a
layer of 218M gradients on 4 ranks 0.45 ms in place of 0.30.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..core.engine.reduce import Reduction
from ..core.runtime.comm import Communicator, Pair, Reduce
from ..kernels import kernel_or_warning

SumRows = Callable[[torch.Tensor, torch.Tensor, float, bool], None]


def sum_rows(
    rows: torch.Tensor, output: torch.Tensor, scale: float = 1.0, accumulate: bool = False
) -> None:
    """`output` (n) becomes, or with `accumulate` grows by, `scale` times the sum of `rows` (r, n).

    Both may be float32 or bfloat16; additions are in float32, the result is rounded once.
    """
    run = _kernel(rows.device) if rows.is_cuda else None
    (run or _by_torch)(rows, output, scale, accumulate)


def _by_torch(
    rows: torch.Tensor, output: torch.Tensor, scale: float, accumulate: bool
) -> None:
    total = torch.sum(rows, dim=0, dtype=torch.float32)
    if accumulate:
        output.add_(total, alpha=scale)
    else:
        output.copy_(total.mul_(scale))


@functools.cache
def _kernel(device: torch.device) -> SumRows | None:
    def tried() -> SumRows:
        from .triton_sums import sum_rows as kernel

        kernel(torch.zeros(1, 1, device=device), torch.zeros(1, device=device), 1.0, False)
        return kernel

    return kernel_or_warning(
        tried, "sums of exchanged gradients are left to torch, which takes half as long again"
    )


@dataclass(frozen=True)
class SumsOfReceived:
    """A handle that adds up what the ranks sent when it is waited for. `works` are those of the
    exchange."""

    works: Sequence[Any]
    add_up: Callable[[], None]

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        self.add_up()


def reduce_scatter(
    communicator: Communicator, pairs: Sequence[Pair], scale: float = 1.0,
    accumulate: bool = False, receive: Callable[[torch.Tensor], torch.Tensor] = torch.empty_like,
    sum_rows: SumRows = sum_rows,
) -> list[Any]:
    """Sums in float32 of what travels in the inputs' dtype, times `scale`. Each pair is (output of
    n elements, input of n * size elements); the output may be this rank's slice of the input.
    accumulate: the outputs have values, to which is added. receive: memory for what comes in place
    of an input.

    One launch each: all-to-alls do not coalesce.
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
    communicator: Communicator, parts: Sequence[Reduction], sum_rows: SumRows = sum_rows
) -> list[Any]:
    """`reduce_scatter` of each part, into the main gradients."""
    works = []
    for part in parts:
        pairs = list(zip(part.group.grad_segments, part.segments, strict=True))
        works += reduce_scatter(
            communicator, pairs, part.reduce.after, part.adds, part.receive, sum_rows
        )
    return works


ALL_TO_ALL_SUM = Reduce("all_to_all_sum", launch, into_shards=True)
FIXED_ALL_TO_ALL_SUM = replace(ALL_TO_ALL_SUM, name="fixed_all_to_all_sum", fixed=True)
