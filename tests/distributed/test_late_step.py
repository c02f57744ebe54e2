"""An optimizer's step that goes on under the next forward: the bits of one that does not, under
every strategy, whatever comes between."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_fsdp_adapter.sharding.late_optimizer import LateShards
from tests.distributed.checks import Step, check_run_bits, recorded_step
from tests.distributed.gpt import (
    STRATEGIES,
    Case,
    Trainer,
    batches,
    build_trainer,
    distributed_optimizer,
    forward_backward,
    init_megatron,
    train_step,
)
from tests.distributed.launch import run_ranks
from tests.distributed.test_streamed_optimizer import (
    _between_steps,
    _fused_and_frozen,
    _topology,
)

CASE = Case(
    num_layers=2, hidden=12, heads=2, ffn=20, vocab=23, microbatches=2, clip=0.05, bf16=True
)
LATE = {"fsdp_overlap_param_gather_with_optimizer_step": True}
BF16 = torch.bfloat16

VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "bf16 weights": ({}, {}),
    "float32 weights": ({"bf16": False, "microbatches": 1}, {}),
    "tied, recomputed": ({"tied": True, "recompute": "full-1"}, {}),
    "bf16 on the wire": ({}, {"megatron_fsdp_grad_comm_dtype": BF16}),
    "some units stay whole": ({}, {"fsdp_unsharded_budget_gib": 1e-6}),
    "instances": (
        {}, {"num_distributed_optimizer_instances": 2, "outer_dp_sharding_strategy": "optim"}
    ),
}


def _scheduled(trainer: Trainer, rank: int, device: torch.device) -> list[Step]:
    """Each step has a learning rate and decay of its own, which change as soon as it returns."""
    found = []
    for number in range(5):
        data = batches(trainer.case, number, rank, device)
        for group in trainer.optimizer.param_groups:
            group["lr"], group["weight_decay"] = 1e-2 / (1 + number), 0.1 * (number % 2)
        if number in (0, 4):
            found.append(recorded_step(trainer, data))
        else:
            loss, norm = train_step(trainer, data)
            found.append(Step(loss, norm, {}, {}))
        for group in trainer.optimizer.param_groups:
            group["lr"] = group["weight_decay"] = float("nan")
        if number == 2:
            found.append(Step(forward_backward(trainer, data, forward_only=True), 0.0, {}, {}))
    assert all(step.norm > trainer.case.clip for step in found if step.norm), "nothing was clipped"
    return found


def _same_bits(rank: int, world: int, name: str, strategies: tuple[str, ...]) -> None:
    changes, ddp = VARIANTS[name]
    case, device = CASE.but(**changes), _device(ddp)
    for strategy in strategies:
        if "fsdp_unsharded_budget_gib" in ddp and strategy in ("no_shard", "optim"):
            continue
        plain = build_trainer(case, strategy, device, ddp=ddp)
        ours = build_trainer(case, strategy, device, ddp={**ddp, **LATE})
        shards = distributed_optimizer(ours).optimizer._fsdp_shards
        assert type(shards) is LateShards and shards._may_be_late() and len(shards._stages) > 2
        check_run_bits(_scheduled(ours, rank, device), _scheduled(plain, rank, device), strategy)
        assert shards._clip is None


def _device(ddp: dict[str, Any]) -> torch.device:
    name = "num_distributed_optimizer_instances"
    return init_megatron(**{key: value for key, value in ddp.items() if key == name})


def test_steps_have_the_bits_of_steps_that_wait() -> None:
    run_ranks(_same_bits, 2, "bf16 weights", ("optim", "optim_grads_params"))


@pytest.mark.full
@pytest.mark.parametrize("name", VARIANTS)
def test_steps_have_the_bits_of_steps_that_wait_in_variants(name: str) -> None:
    run_ranks(_same_bits, 2, name, STRATEGIES)


@pytest.mark.once
def test_what_is_written_between_steps_is_computed_with() -> None:
    """A step that is left out leaves out every unit's."""
    run_ranks(_between_steps, 2, LATE)


@pytest.mark.full
def test_fused_optimizers_with_gradients_and_moments_in_bf16_and_frozen_parameters() -> None:
    run_ranks(_fused_and_frozen, 2, LATE)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "world", "strategy"),
    [
        ("pp2-vpp2", 2, "optim_grads_params"), ("ep2-etp2", 4, "optim"),
        ("ep2-pp2", 4, "optim_grads_params"),
    ],
)  # fmt: skip
def test_other_axes(name: str, world: int, strategy: str) -> None:
    run_ranks(_topology, world, name, strategy, LATE)


def _one_rank(rank: int, world: int) -> None:
    """Whoever reads gradients between clipping and the step finds them clipped; so are they where
    no step comes."""
    device = init_megatron()
    found: dict[str, list[Any]] = {}
    for ddp in ({}, LATE):
        options = {"log_num_zeros_in_grad": True}
        trainer = build_trainer(CASE, "optim", device, ddp=ddp, optimizer=options)
        inner = distributed_optimizer(trainer)
        forward_backward(trainer, batches(CASE, 0, rank, device))
        first = inner.clip_grad_norm(CASE.clip)
        values = [param.grad._local_tensor.clone() for param in inner.get_parameters()]
        second = inner.step()
        inner.config.grad_norm_skip_threshold, inner.config.log_num_zeros_in_grad = 0.0, False
        forward_backward(trainer, batches(CASE, 1, rank, device))
        skipped = inner.step()
        values += [param.grad._local_tensor.clone() for param in inner.get_parameters()]
        values += list(trainer.params().values())
        found[str(ddp)] = [first, second, skipped, values]
    (*plain, before), (*ours, after) = found.values()
    assert plain == ours
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_readers_of_gradients_find_them_clipped_on_one_rank() -> None:
    run_ranks(_one_rank, 1)
