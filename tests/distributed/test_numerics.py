"""Training with each strategy gives the numbers of stock DDP with the distributed optimizer.

Guards against traps G1 and G8 (scale on the accumulated shard, groups of one rank), G3
(average_in_collective), G4 (norm of replicated gradients), G12 (accumulation in low precision),
H7 (norm over the wrong group) and M8 (a step spent on making optimizer state).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch

from tests.distributed.checks import (
    Step,
    Tensors,
    check_run,
    check_run_bits,
    check_same_bits,
    check_step,
    check_within,
    free_run,
    passes,
    recorded_step,
    steps_from_reference,
)
from tests.distributed.exact import exact_gradients, rounding_bounds
from tests.distributed.faults import dropped_microbatch, scaled_gradients
from tests.distributed.gpt import (
    STRATEGIES,
    Case,
    Trainer,
    batches,
    build_trainer,
    forward_backward,
    init_megatron,
    load_weights,
)
from tests.distributed.launch import run_ranks
from tests.distributed.random_cases import fresh_seed, random_case

FOUR, EIGHT = (pytest.param(world, marks=pytest.mark.full) for world in (4, 8))
KEPT_GRADS, SHARDED_GRADS = ("no_shard", "optim"), ("optim_grads", "optim_grads_params")
"""The first sum microbatches on each rank before they reduce, as stock DDP does; the others reduce
each microbatch."""


def trainers(
    case: Case, device: torch.device, strategies: Sequence[str] = STRATEGIES, **options: Any
) -> dict[str, Trainer]:
    return {name: build_trainer(case, name, device, **options) for name in strategies}


def _compare_each_step(
    rank: int, world: int, case: Case, strategies: Sequence[str], ddp: Mapping[str, Any]
) -> None:
    device = init_megatron()
    reference = build_trainer(case, None, device, ddp=ddp)
    ours = trainers(case, device, strategies, ddp=ddp)
    for strategy, mine, theirs in steps_from_reference(reference, ours, rank, 3, device):
        check_step(mine, theirs, f"{strategy} on {world} ranks, {case}")


@pytest.mark.parametrize("world", (1, 2, 4, EIGHT))
def test_each_step_from_the_reference_weights(world: int) -> None:
    """Show 2 (a): weight decay, clipping at 1.0, 3 microbatches, uneven random shapes."""
    run_ranks(_compare_each_step, world, random_case(fresh_seed()), STRATEGIES, {})


def test_options_of_the_reduction_change_no_gradient() -> None:
    """Trap G3: averaging in the collective and scaling after it are the same mean."""
    ddp = {"average_in_collective": True, "gradient_reduce_div_fusion": False}
    run_ranks(_compare_each_step, 2, random_case(fresh_seed()), STRATEGIES, ddp)


@pytest.mark.parametrize("world", (1, 2))
def test_loss_per_token(world: int) -> None:
    """`scale_gradients` gets 1 / tokens; every microbatch and rank has another number of them."""
    case = random_case(fresh_seed()).but(per_token_loss=True)
    run_ranks(_compare_each_step, world, case, STRATEGIES, {})


@pytest.mark.parametrize("microbatches", (1, 3))
def test_without_overlap(microbatches: int) -> None:
    """Trap G5: without overlap ZeRO-0 and ZeRO-1 reduce at the end of the step, once."""
    case = random_case(fresh_seed()).but(overlap=False, microbatches=microbatches)
    run_ranks(_compare_each_step, 2, case, STRATEGIES, {})


def _run_free(rank: int, world: int, case: Case) -> None:
    device = init_megatron()
    reference = free_run(build_trainer(case, None, device), rank, 20, device)
    for strategy in STRATEGIES:
        steps = free_run(build_trainer(case, strategy, device), rank, 20, device)
        check_run(steps, reference, f"{strategy} on {world} ranks, {case}")


@pytest.mark.parametrize("world", (1, 2, FOUR, EIGHT))
def test_twenty_steps_running_free(world: int) -> None:
    """Show 2 (b): loss, norm and weights after each of 20 steps."""
    case = random_case(fresh_seed()).but(num_layers=1, batch=1)
    run_ranks(_run_free, world, case, timeout=240.0)


def _same_bits(rank: int, world: int, case: Case, strategies: Sequence[str], steps: int) -> None:
    device = init_megatron()
    reference = free_run(build_trainer(case, None, device), rank, steps, device)
    for strategy in strategies:
        run = free_run(build_trainer(case, strategy, device), rank, steps, device)
        check_run_bits(run, reference, f"{strategy} on {world} ranks, {case}")


@pytest.mark.parametrize("bf16", (False, True), ids=("fp32", "bf16"))
@pytest.mark.parametrize(
    ("world", "microbatches", "strategies"),
    ((1, 3, STRATEGIES), (2, 3, KEPT_GRADS), (2, 1, STRATEGIES)),
    ids=("1-rank", "2-ranks-3-microbatches", "2-ranks-1-microbatch"),
)
def test_same_bits_where_the_order_of_summation_is_the_same(
    world: int, microbatches: int, strategies: Sequence[str], bf16: bool
) -> None:
    """Show 2 (c): two addends commute, and halving is exact. Without clipping: the norm is a sum
    over tensors, which the two systems cut and order differently. In bf16 the steps run free as
    well, which no bound on a rounding error allows: one flipped bit grows."""
    case = random_case(fresh_seed()).but(microbatches=microbatches, clip=0.0, bf16=bf16)
    run_ranks(_same_bits, world, case, strategies, 5)


def _check_within_bounds(
    ours: Mapping[str, Trainer], weights: Tensors, rank: int, number: int, comm_bf16: bool
) -> None:
    """One step of each from `weights`."""
    case, device = next(iter(ours.values())).case, init_megatron()
    data = batches(case, number, rank, device)
    exact, absolute = exact_gradients(case, weights, data, device)
    world = torch.distributed.get_world_size()
    allowed = rounding_bounds(absolute, world, case.microbatches, comm_bf16)
    for strategy, trainer in ours.items():
        load_weights(trainer, dict(weights))
        step = recorded_step(trainer, data)
        label = f"{strategy} on {world} ranks, step {number}, {case}"
        check_within(step.gradients, exact, allowed, label)


def _within_bounds(rank: int, world: int, case: Case, comm_bf16: bool) -> None:
    device = init_megatron()
    ddp = {"megatron_fsdp_grad_comm_dtype": torch.bfloat16} if comm_bf16 else {}
    ours = trainers(case, device, STRATEGIES, ddp=ddp)
    for number in range(2):
        weights = ours["optim_grads_params"].params()
        _check_within_bounds(ours, weights, rank, number, comm_bf16)


@pytest.mark.parametrize("comm_bf16", (False, True), ids=("fp32-comm", "bf16-comm"))
@pytest.mark.parametrize("bf16", (False, True), ids=("fp32", "bf16"))
@pytest.mark.parametrize("world", (1, 2, FOUR))
def test_gradients_within_derived_bounds(world: int, bf16: bool, comm_bf16: bool) -> None:
    """Show 2 (d). Main gradients are fp32, so with compute in bf16 every microbatch's gradient is
    a bf16 number that enters a float32 sum without a rounding of its own, and only the additions
    round; `exact.rounding_bounds` derives how much. With communication in bf16 the reduction
    rounds to bf16, its error bound is 2^16 times larger (traps G12, M1).

    The exact sum comes from a model that nothing wraps, not from stock DDP.
    """
    case = random_case(fresh_seed()).but(bf16=bf16)
    run_ranks(_within_bounds, world, case, comm_bf16)


TAKEN_STEPS = 3
MOST_STEPS = 40
"""More than the halvings that bring the first loss scale to 1, however large the gradients are."""


def _loss_scaler_run(trainer: Trainer, rank: int, device: torch.device) -> list[Any]:
    """Per step: loss, whether the optimizer stepped, the loss scale after it; and the weights."""
    results: list[Any] = []
    while sum(stepped for _, stepped, _ in results) < TAKEN_STEPS and len(results) < MOST_STEPS:
        data = batches(trainer.case, len(results), rank, device)
        loss = forward_backward(trainer, data)
        stepped, _, _ = trainer.optimizer.step()
        results.append((loss, stepped, trainer.optimizer.get_loss_scale().item()))
    return [results, trainer.params()]


def _same_loss_scaling(rank: int, world: int, case: Case) -> list[bool]:
    device = init_megatron()
    steps, weights = _loss_scaler_run(build_trainer(case, None, device), rank, device)
    for strategy in KEPT_GRADS if case.microbatches > 1 else STRATEGIES:
        ours, own_weights = _loss_scaler_run(build_trainer(case, strategy, device), rank, device)
        assert ours == steps, (strategy, ours, steps, case)
        check_same_bits(own_weights, weights, f"{strategy}, {case}")
    return [stepped for _, stepped, _ in steps]


@pytest.mark.parametrize("microbatches", (1, 3))
def test_fp16_with_a_loss_scaler(microbatches: int) -> None:
    """Steps that overflow are skipped on every rank alike, halve the scale and leave no trace."""
    case = random_case(fresh_seed()).but(
        fp16=True, loss_scale=2.0**24, clip=0.0, microbatches=microbatches
    )
    stepped = run_ranks(_same_loss_scaling, 2, case)[0]
    assert not stepped[0] and sum(stepped) == TAKEN_STEPS, (stepped, case)


# The suite's power: the same checks fail on an engine with a mistake in it.


Passed = dict[str, dict[str, bool]]
"""Strategy and check of the suite -> whether it passes."""

FAULTS = ("none", "scaled by 1.001", "one microbatch of one rank dropped")
FAULTY_STEPS = 5


def _fault(name: str, case: Case) -> AbstractContextManager[None]:
    faults = {
        "none": nullcontext,
        "scaled by 1.001": lambda: scaled_gradients(1.001),
        "one microbatch of one rank dropped": lambda: dropped_microbatch(case.microbatches),
    }
    return faults[name]()


def checks_under_all(
    rank: int, world: int, case: Case, faults: Iterable[str] = FAULTS
) -> dict[str, Passed]:
    """By fault."""
    device = init_megatron()
    reference = free_run(build_trainer(case, None, device), rank, FAULTY_STEPS, device)
    bits = free_run(build_trainer(case.but(clip=0.0), None, device), rank, 2, device)
    return {fault: _checks_under(rank, case, fault, reference, bits) for fault in faults}


def _checks_under(
    rank: int, case: Case, fault: str, reference: list[Step], bits: list[Step]
) -> Passed:
    """What passes with `fault` in the engine; `bits`: the reference's steps without clipping."""
    device, unclipped = init_megatron(), case.but(clip=0.0)
    passed: Passed = {}
    with _fault(fault, case):
        for strategy in STRATEGIES:
            ours = build_trainer(case, strategy, device)
            steps = free_run(ours, rank, FAULTY_STEPS, device)
            own_bits = free_run(build_trainer(unclipped, strategy, device), rank, 2, device)
            passed[strategy] = {
                "step": passes(check_step, steps[0], reference[0], strategy),
                "run": passes(check_run, steps, reference, strategy),
                "bits": passes(check_run_bits, own_bits, bits, strategy),
                "bounds": passes(
                    _check_within_bounds, {strategy: ours}, steps[-1].weights, rank, 20, False
                ),
            }
    return passed


@pytest.mark.once
def test_every_check_sees_a_mistake() -> None:
    """Show 2 (e): with a mistake in the engine no check passes, for any strategy; without one all
    do, except that bits differ where the order of summation does."""
    case = random_case(fresh_seed()).but(num_layers=1, batch=1)
    for fault, passed in run_ranks(checks_under_all, 2, case)[0].items():
        for strategy, checks in passed.items():
            if fault == "none":
                checks["bits"] |= strategy in SHARDED_GRADS
                assert all(checks.values()), (strategy, checks, case)
            else:
                assert not any(checks.values()), (fault, strategy, checks, case)
