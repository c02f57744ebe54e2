"""Rows of the numerics suite: trainings beside stock DDP, on the host and on GPUs."""

from __future__ import annotations

import math
from typing import Any

import torch

from tests.lib.gpt.checks import Step
from tests.lib.gpt.gpt import STRATEGIES, batches, forward_backward
from tests.lib.gpt.injected_faults import Spoiler
from tests.lib.gpt.variants import ZERO_0, ZERO_1, Comparison, Variant, differ_by_rank, unchanged

KEPT_GRADS = (ZERO_0, ZERO_1)
"""These sum microbatches on each rank before they reduce, as stock DDP does; the others reduce
each microbatch."""
SCALE = 2.0**24
TAKEN = 3


def scaled_step(trainer: Any, number: int, rank: int) -> Step:
    """A step that may be left out; the loss scale after it in the place of the norm."""
    device = next(trainer.wrapper.parameters()).device
    loss = forward_backward(trainer, batches(trainer.case, number, rank, device))
    trainer.optimizer.step()
    scale = trainer.optimizer.get_loss_scale().item()
    return Step(loss, scale, {}, trainer.params())


SPOILER = Spoiler("decoder.layers.0.mlp.linear_fc1.weight")


def spoiled_step(trainer: Any, number: int, rank: int) -> Step:
    """In the second step there is an infinity in one gradient of one rank."""
    SPOILER.value = math.inf if number == 1 else None
    return scaled_step(trainer, number, rank)


def one_step_was_left_out(ours: Any, reference: Any, strategy: str) -> None:
    assert ours.optimizer.get_loss_scale().item() == SPOILED.case["loss_scale"] / 2


def same_scale(ours: Step, reference: Step, label: str) -> None:
    assert ours.norm == reference.norm, label


def some_steps_were_left_out(ours: Any, reference: Any, strategy: str) -> None:
    """The first one was, and `TAKEN` were not."""
    scale = ours.optimizer.get_loss_scale().item()
    assert SCALE / 2 ** (SCALED.steps - TAKEN) <= scale <= SCALE / 2, scale


EACH = Variant("each step", random=True)
FREE = EACH.but("ten free steps", case={"num_layers": 1, "batch": 1}, compare="free", steps=10)
BITS = EACH.but("bits", case={"clip": 0.0}, compare="bits but norm", steps=5)
SCALED = EACH.but(
    "fp16 with a loss scaler",
    case={"fp16": True, "loss_scale": SCALE, "clip": 0.0},
    strategies=KEPT_GRADS,
    compare="bits",
    drive=scaled_step,
    steps=20,
    expect=some_steps_were_left_out,
)
ONE_MICROBATCH = SCALED.but(
    "fp16, one microbatch", case={**SCALED.case, "microbatches": 1}, strategies=STRATEGIES
)
SPOILED = ONE_MICROBATCH.but(
    "fp16, an infinity on one rank",
    case={**ONE_MICROBATCH.case, "loss_scale": 256.0},
    change=SPOILER.attach,
    drive=spoiled_step,
    expect=one_step_was_left_out,
    steps=3,
)
ROWS: list[Variant] = []
for _n in (1, 2, 4, 8):
    ROWS.append(EACH.but(f"each step, {_n} ranks", world=_n, full=_n == 8))
ROWS.append(
    EACH.but(
        "averaged in the collective",
        ddp={"average_in_collective": True, "gradient_reduce_div_fusion": False},
    )
)
for _n in (1, 2):
    ROWS.append(EACH.but(f"loss per token, {_n} ranks", world=_n, case={"per_token_loss": True}))
ROWS.append(
    EACH.but(
        "ranks that begin differently",
        change=differ_by_rank,
        reference={"change": unchanged},
        compare="free",
    )
)
# Trap G5: without overlap ZeRO-0 and ZeRO-1 reduce at the end of the step, once.
for _n in (1, 3):
    _case = {"overlap": False, "microbatches": _n}
    ROWS.append(EACH.but(f"no overlap, {_n} microbatches", case=_case))
for _n in (1, 2, 4, 8):
    ROWS.append(FREE.but(f"ten free steps, {_n} ranks", world=_n, full=_n > 2))
# Two addends commute, and halving is exact. Without clipping: the norm is a sum over tensors,
# which the two systems cut and order differently. In bf16 no bound on a rounding error allows
# what these steps show: one flipped bit grows.
for _world, _n, _strategies in ((1, 3, STRATEGIES), (2, 3, KEPT_GRADS), (2, 1, STRATEGIES)):
    for _bf16 in (False, True):
        _dtype = "bf16" if _bf16 else "fp32"
        ROWS.append(
            BITS.but(
                f"bits, {_world} ranks, {_n} microbatches, {_dtype}",
                world=_world,
                strategies=_strategies,
                case={**BITS.case, "microbatches": _n, "bf16": _bf16},
            )
        )
ROWS.append(SCALED)
ROWS.append(ONE_MICROBATCH)
ROWS.append(SPOILED)
ROWS.append(
    SPOILED.but(
        f"{SPOILED.name}, bf16 on the wire",
        ddp={"megatron_fsdp_grad_comm_dtype": torch.bfloat16},
        compare=Comparison(same_scale, same_scale),
    )
)
"""Each run draws other sizes of the models. Where a loss scaler leaves a step out, all ranks
do, the scale is halved, and no weight has moved."""
