"""Modules with streams of their own, as token dispatchers have that communicate beside compute.

What they must do is what torch asks of any of them: join the stream that called them before they
return, in forward and in backward. Then no access of theirs crosses one of the engine's; the race
checker, which has a clock for their stream too, sees where one does not join.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from megatron_fsdp_adapter.core.config import STRATEGIES
from megatron_fsdp_adapter.core.runtime.device import COMPUTE
from tests.engine.engine_cases import Layer, Setup, build
from tests.engine.engine_scenarios import SCENARIOS
from tests.engine.pretended import pretended_world
from tests.engine.recording import RaceError, RecordingRuntime
from tests.engine.traces import collectives

SIDE = "side"
ZERO_3 = "optim_grads_params"
VARIANTS: dict[str, dict[str, Any]] = {
    "slots": {"slots": True},
    "recomputed": {"recompute": "non_reentrant"},
    "two domains": {"split": True, "world": 4, "rank": 1},
}


@dataclass(frozen=True)
class Side:
    """The modules' stream. `forgets`: what it does not wait for ("fork": the caller's work) or the
    caller not for it ("join"), and in which direction, as "join in backward"."""

    runtime: RecordingRuntime
    forgets: str = ""

    def run(self, work: Callable[[], Any], direction: str) -> None:
        def task() -> None:
            work()

        if self.forgets != f"fork in {direction}":
            self.runtime.wait(SIDE, self.runtime.record(COMPUTE))
        self.runtime.submit(SIDE, task)
        if self.forgets != f"join in {direction}":
            self.runtime.wait(COMPUTE, self.runtime.record(SIDE))


def made_by_compute(shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """Memory that the caller's stream has written once: it is this stream's when it goes back."""
    return like.new_empty(shape).zero_()


class Exchanged(torch.autograd.Function):
    """The identity, carried by the side stream in both directions."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, side: Side) -> torch.Tensor:
        ctx.side = side
        return _carried(value, side, "forward")

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _carried(grad, ctx.side, "backward"), None


def _carried(value: torch.Tensor, side: Side, direction: str) -> torch.Tensor:
    received = made_by_compute(value.shape, value)
    side.run(lambda: received.copy_(value), direction)
    return received


class Product(torch.autograd.Function):
    """A matrix product on the side stream, which thus reads a weight and writes its gradient."""

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


Inner = Callable[[Layer, torch.Tensor, Side], torch.Tensor]


def dispatched(layer: Layer, x: torch.Tensor, side: Side) -> torch.Tensor:
    """Activations go away and come back on the side stream; products stay where they are."""
    return Exchanged.apply(Layer._inner(layer, Exchanged.apply(x, side)), side)


def computed(layer: Layer, x: torch.Tensor, side: Side) -> torch.Tensor:
    """One of the products runs on the side stream."""
    rows = torch.nn.functional.gelu(layer.up(x)).flatten(0, -2)
    return (Product.apply(rows, layer.down.weight, side) + layer.down.bias).view_as(x)


def reordered(layer: Layer, x: torch.Tensor, side: Side) -> torch.Tensor:
    """As shared experts beside a dispatcher: autograd is told to run nodes of their branch before
    all others, or after some."""
    if not torch.is_grad_enabled():
        return Layer._inner(layer, x)
    there = Exchanged.apply(x, side)
    first = layer.up(x)
    first.grad_fn._set_sequence_nr(torch.iinfo(torch.int).max)
    rows = torch.nn.functional.gelu(first)
    rows.grad_fn._set_sequence_nr(there.grad_fn._sequence_nr() - 1)
    out = layer.down(rows)
    out.grad_fn._set_sequence_nr(torch.iinfo(torch.int).max)
    return out + 0.0 * Exchanged.apply(there, side)


INNER: dict[str, Inner] = {
    "dispatched": dispatched, "computed": computed, "reordered": reordered,
}  # fmt: skip


def run(setup: Setup, inner: Inner, scenario: str, forgets: str = "") -> None:
    runtime = RecordingRuntime(SIDE)
    with pretended_world(setup.world, setup.rank):
        rig = build(setup, runtime)
        side = Side(runtime, forgets)
        for layer in rig.model.layers:
            layer._inner = functools.partial(inner, layer, side=side)
        with rig.watch():
            SCENARIOS[scenario](rig)


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_module_that_joins_its_own_stream_races_with_nothing(strategy, inner):
    for scenario in ("microbatches", "evaluation_between", "forwards_in_flight"):
        run(Setup(strategy), INNER[inner], scenario)


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_module_that_joins_its_own_stream_races_with_nothing_in_variants(variant, inner):
    run(Setup(ZERO_3, **VARIANTS[variant]), INNER[inner], "microbatches")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_order_in_which_autograd_runs_a_layers_nodes_changes_no_weight(strategy):
    """A unit's backward is over when the gradients of its inputs are known, in any order."""
    found = {}
    plain: Inner = lambda layer, x, side: Layer._inner(layer, x)  # noqa: E731
    for name, inner in {"plain": plain, **INNER}.items():
        with pretended_world(2):
            runtime = RecordingRuntime(SIDE)
            rig = build(Setup(strategy), runtime)
            for layer in rig.model.layers:
                layer._inner = functools.partial(inner, layer, side=Side(runtime))
            SCENARIOS["microbatches"](rig)
            found[name] = rig.weights()
            counted = collectives(rig)
        assert counted == found.setdefault("collectives", counted), name
    for key, value in found["plain"].items():
        assert torch.equal(found["dispatched"][key], value), key
        assert torch.equal(found["reordered"][key], value), key


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("forgets", ["fork in forward", "join in forward", "fork in backward",
                                     "join in backward"])  # fmt: skip
def test_a_module_that_does_not_join_its_own_stream_is_a_race(inner, forgets):
    with pytest.raises(RaceError, match="without waiting for"):
        run(Setup(ZERO_3), INNER[inner], "steps", forgets)
