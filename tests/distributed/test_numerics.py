"""Training with each strategy gives the numbers of stock DDP with the distributed optimizer.

Guards against traps G1 and G8 (scale on the accumulated shard, groups of one rank), G3
(average_in_collective), G4 (norm of replicated gradients), G12 (accumulation in low precision),
H7 (norm over the wrong group) and M8 (a step spent on making optimizer state).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch

from tests.distributed.checks import Step, check_within, passes, recorded_step
from tests.distributed.exact import exact_gradients, rounding_bounds
from tests.distributed.faults import dropped_microbatch, scaled_gradients
from tests.distributed.gpt import STRATEGIES, batches, forward_backward
from tests.distributed.shared_ranks import on_ranks
from tests.distributed.variants import (
    ZERO_0,
    ZERO_1,
    ZERO_2,
    ZERO_3,
    Variant,
    compare,
    marked,
    problems,
    weights_of,
)

FOUR = pytest.param(4, marks=pytest.mark.full)
KEPT_GRADS = (ZERO_0, ZERO_1)
"""These sum microbatches on each rank before they reduce, as stock DDP does; the others reduce
each microbatch."""
SCALE, TAKEN = 2.0**24, 3


def scaled_step(trainer: Any, number: int, rank: int) -> Step:
    """A step that may be left out; the loss scale after it in the place of the norm."""
    device = next(trainer.wrapper.parameters()).device
    loss = forward_backward(trainer, batches(trainer.case, number, rank, device))
    trainer.optimizer.step()
    scale = trainer.optimizer.get_loss_scale().item()
    return Step(loss, scale, {}, weights_of(trainer))


def some_steps_were_left_out(ours: Any, reference: Any, strategy: str) -> None:
    """The first one was, and `TAKEN` were not."""
    scale = ours.optimizer.get_loss_scale().item()
    assert SCALE / 2 ** (SCALED.steps - TAKEN) <= scale <= SCALE / 2, scale


EACH = Variant("each step", random=True)
FREE = EACH.but("twenty free steps", case={"num_layers": 1, "batch": 1}, compare="free", steps=20)
BITS = EACH.but("bits", case={"clip": 0.0}, compare="bits but norm", steps=5)
SCALED = EACH.but(
    "fp16 with a loss scaler", case={"fp16": True, "loss_scale": SCALE, "clip": 0.0},
    strategies=KEPT_GRADS, compare="bits", drive=scaled_step, steps=20,
    expect=some_steps_were_left_out,
)  # fmt: skip
ROWS = (
    *(EACH.but(f"each step, {n} ranks", world=n, full=n == 8) for n in (1, 2, 4, 8)),
    EACH.but(
        "averaged in the collective",
        ddp={"average_in_collective": True, "gradient_reduce_div_fusion": False},
    ),
    *(
        EACH.but(f"loss per token, {n} ranks", world=n, case={"per_token_loss": True})
        for n in (1, 2)
    ),
    # Trap G5: without overlap ZeRO-0 and ZeRO-1 reduce at the end of the step, once.
    *(
        EACH.but(f"no overlap, {n} microbatches", case={"overlap": False, "microbatches": n})
        for n in (1, 3)
    ),
    *(FREE.but(f"twenty free steps, {n} ranks", world=n, full=n > 2) for n in (1, 2, 4, 8)),
    # Two addends commute, and halving is exact. Without clipping: the norm is a sum over tensors,
    # which the two systems cut and order differently. In bf16 no bound on a rounding error allows
    # what these steps show: one flipped bit grows.
    *(
        BITS.but(
            f"bits, {world} ranks, {n} microbatches, {'bf16' if bf16 else 'fp32'}", world=world,
            strategies=strategies, case={**BITS.case, "microbatches": n, "bf16": bf16},
        )
        for world, n, strategies in ((1, 3, STRATEGIES), (2, 3, KEPT_GRADS), (2, 1, STRATEGIES))
        for bf16 in (False, True)
    ),
    SCALED,
    SCALED.but(
        "fp16, one microbatch", case={**SCALED.case, "microbatches": 1},
        strategies=STRATEGIES,
    ),
)  # fmt: skip
"""Sizes of the models are drawn anew in each run. Where a loss scaler leaves a step out, all ranks
do, the scale is halved, and no weight has moved."""


@pytest.mark.parametrize("row", marked(ROWS))
@on_ranks()
def test_trains_like_stock_ddp(row: Variant, rank: int, seed: int) -> None:
    """Weight decay, clipping at 1.0, three microbatches, uneven shapes; and what the row says."""
    compare(row, rank, seed)


def gradients_within_bounds(
    rank: int, world: int, seed: int, bf16: bool, comm_bf16: bool
) -> None:
    """Main gradients are fp32, so with compute in bf16 every microbatch's gradient is a bf16 number
    that enters a float32 sum without a rounding of its own, and only the additions round;
    `exact.rounding_bounds` derives how much. With communication in bf16 the reduction rounds to
    bf16, its error bound is 2^16 times larger (traps G12, M1).

    The exact sum comes from a model that nothing wraps, not from stock DDP.
    """
    ddp = {"megatron_fsdp_grad_comm_dtype": torch.bfloat16} if comm_bf16 else {}
    row = EACH.but("", case={"bf16": bf16}, ddp=ddp)
    for strategy in STRATEGIES:
        for number in range(2):
            _check_within_bounds(row, strategy, rank, seed, number, comm_bf16)


@pytest.mark.parametrize("comm_bf16", (False, True), ids=("fp32-comm", "bf16-comm"))
@pytest.mark.parametrize("bf16", (False, True), ids=("fp32", "bf16"))
@pytest.mark.parametrize("world", (1, 2, FOUR))
@on_ranks()
def test_gradients_within_derived_bounds(
    rank: int, world: int, seed: int, bf16: bool, comm_bf16: bool
) -> None:
    gradients_within_bounds(rank, world, seed, bf16, comm_bf16)


def _check_within_bounds(
    row: Variant, strategy: str, rank: int, seed: int, number: int = 0, comm_bf16: bool = False
) -> None:
    """A step from weights that as many steps before have left."""
    device, case = row.start(), row.case_of(seed)
    trainer = row.trainer(strategy, case, device)
    for before in range(number):
        row.drive(trainer, before, rank)
    weights, data = weights_of(trainer), batches(case, number, rank, device)
    exact, absolute = exact_gradients(case, weights, data, device)
    world = torch.distributed.get_world_size()
    allowed = rounding_bounds(absolute, world, case.microbatches, comm_bf16)
    label = f"{strategy} on {world} ranks, step {number}, {case}"
    check_within(recorded_step(trainer, data).gradients, exact, allowed, label)


# The suite's power: the same checks fail on an engine with a mistake in it.

FAULTS: Mapping[str, Callable[[], AbstractContextManager[None]]] = {
    "none": nullcontext,
    "scaled by 1.001": lambda: scaled_gradients(1.001),
    "one microbatch of one rank dropped": lambda: dropped_microbatch(3),
}


def checks_see(rank: int, world: int, seed: int, fault: str) -> None:
    """With a mistake in the engine no check passes, for any strategy; without one all do, except
    that bits differ where the order of summation does."""
    sees: dict[str, set[str]] = {}
    with FAULTS[fault]():
        for row in (EACH, FREE, BITS):
            row = row.but(row.name, case={**FREE.case, **row.case}, steps=2)
            sees[row.name] = {strategy for strategy, _ in problems(row, rank, seed)}
        row = EACH.but("bounds", case=FREE.case)
        sees["bounds"] = {
            strategy for strategy in STRATEGIES
            if not passes(_check_within_bounds, row, strategy, rank, seed)
        }  # fmt: skip
    if fault == "none":
        sees["bits"] -= {ZERO_2, ZERO_3}
    for name, strategies in sees.items():
        assert strategies == (set() if fault == "none" else set(STRATEGIES)), (name, sees)


@pytest.mark.parametrize("fault", FAULTS)
@on_ranks(2)
def test_every_check_sees_a_mistake(rank: int, world: int, seed: int, fault: str) -> None:
    checks_see(rank, world, seed, fault)
