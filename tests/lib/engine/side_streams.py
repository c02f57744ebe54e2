"""Layers with a stream of their own, as token dispatchers have that communicate beside compute.

What they must do is what torch asks of any of them: join the stream that called them before they
return, in forward and in backward. Then no access of theirs crosses one of the engine's; the race
checker, which has a clock for their stream too, sees where one does not join.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_fsdp_adapter.core.runtime.device import COMPUTE

SIDE = "side"


@dataclass(frozen=True)
class Side:
    """The layers' stream. `forgets`: what it does not wait for ("fork": the caller's work) or the
    caller not for it ("join"), and in which direction, as "join in backward"."""

    runtime: Any
    forgets: str = ""

    def run(self, work: Callable[[], Any], direction: str) -> None:
        def task() -> None:
            work()

        if self.forgets != f"fork in {direction}":
            self.runtime.wait(SIDE, self.runtime.record(COMPUTE))
        self.runtime.submit(SIDE, task)
        if self.forgets != f"join in {direction}":
            self.runtime.wait(COMPUTE, self.runtime.record(SIDE))

    def carried(self, value: torch.Tensor, direction: str) -> torch.Tensor:
        received = made_by_compute(value.shape, value)
        self.run(lambda: received.copy_(value), direction)
        return received


def made_by_compute(shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """Memory that the caller's stream has written once: it is this stream's when it goes back."""
    return like.new_empty(shape).zero_()


class Exchanged(torch.autograd.Function):
    """The identity, carried by the side stream in both directions."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, side: Side) -> torch.Tensor:
        ctx.side = side
        return side.carried(value, "forward")

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return ctx.side.carried(grad, "backward"), None


class Product(torch.autograd.Function):
    """A GEMM on the side stream, which thus reads a weight and writes its gradient."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: torch.Tensor, side: Side) -> torch.Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.side = side
        out = made_by_compute((rows.shape[0], weight.shape[0]), rows)
        side.run(lambda: torch.mm(rows, weight.t(), out=out), "forward")
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        rows, weight = ctx.saved_tensors
        for_rows, for_weight = (made_by_compute(t.shape, t) for t in (rows, weight))

        def products() -> None:
            torch.mm(grad, weight, out=for_rows)
            torch.mm(grad.t(), rows, out=for_weight)

        ctx.side.run(products, "backward")
        return for_rows, for_weight, None


Inner = Callable[[torch.Tensor], torch.Tensor]


def dispatched(layer: Any, inner: Inner, side: Side, x: torch.Tensor) -> torch.Tensor:
    """Activations go away and come back on the side stream; products stay where they are."""
    return Exchanged.apply(inner(Exchanged.apply(x, side)), side)


def computed(layer: Any, inner: Inner, side: Side, x: torch.Tensor) -> torch.Tensor:
    """One of the products runs on the side stream."""
    rows = torch.nn.functional.gelu(layer.up(x)).flatten(0, -2)
    return (Product.apply(rows, layer.down.weight, side) + layer.down.bias).view_as(x)


def reordered(layer: Any, inner: Inner, side: Side, x: torch.Tensor) -> torch.Tensor:
    """As shared experts beside a dispatcher: autograd runs nodes of their branch before
    all others, or after some."""
    if not torch.is_grad_enabled():
        return inner(x)
    there = Exchanged.apply(x, side)
    first = layer.up(x)
    first.grad_fn._set_sequence_nr(torch.iinfo(torch.int).max)
    rows = torch.nn.functional.gelu(first)
    rows.grad_fn._set_sequence_nr(there.grad_fn._sequence_nr() - 1)
    out = layer.down(rows)
    out.grad_fn._set_sequence_nr(torch.iinfo(torch.int).max)
    return out + 0.0 * Exchanged.apply(there, side)


KINDS = {"dispatched": dispatched, "computed": computed, "reordered": reordered}


def use_side_stream(layers: Iterable[Any], runtime: Any, kind: str, forgets: str) -> None:
    for layer in layers:
        side = Side(runtime, forgets)
        layer._inner = functools.partial(KINDS[kind], layer, layer._inner, side)
