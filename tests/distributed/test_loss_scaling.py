"""Show 4: an infinity in one gradient of one rank skips the step on all; scaling modes agree."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.distributed.checks import check_gradients
from tests.distributed.gpt import (
    STRATEGIES,
    Case,
    batches,
    build_trainer,
    forward_backward,
    init_megatron,
)
from tests.distributed.launch import run_ranks

CASE = Case(
    num_layers=1, hidden=12, heads=2, ffn=20, vocab=23, microbatches=2, fp16=True, loss_scale=256.0
)
NAME = "decoder.layers.0.mlp.linear_fc1.weight"


class Infinity:
    """While on, makes one element of one gradient infinite on the last rank: one element of one
    shard, which only one rank holds after the reduction."""

    def __init__(self) -> None:
        self.on = False

    def attach(self, model: nn.Module) -> None:
        [param] = [p for name, p in model.named_parameters() if name.endswith(NAME)]
        param.register_hook(self._grad)

    def _grad(self, grad: torch.Tensor) -> torch.Tensor | None:
        if not self.on or dist.get_rank() != dist.get_world_size() - 1:
            return None
        spoiled = grad.clone()
        spoiled.view(-1)[-1] = math.inf
        return spoiled


def _skips(rank: int, world: int, options: dict[str, Any]) -> None:
    device = init_megatron()
    for strategy in STRATEGIES:
        infinity = Infinity()
        trainer = build_trainer(CASE, strategy, device, infinity.attach, ddp=options)
        before, scale = trainer.params(), trainer.optimizer.get_loss_scale().item()
        infinity.on = True
        forward_backward(trainer, batches(CASE, 0, rank, device))
        stepped, _, _ = trainer.optimizer.step()
        assert not stepped, strategy
        assert trainer.optimizer.get_loss_scale().item() == scale / 2, strategy
        after = trainer.params()
        assert all(torch.equal(value, after[name]) for name, value in before.items()), strategy
        infinity.on = False
        forward_backward(trainer, batches(CASE, 1, rank, device))
        stepped, norm, _ = trainer.optimizer.step()
        assert stepped and math.isfinite(norm), strategy
        moved = trainer.params()
        assert all(not torch.equal(value, moved[name]) for name, value in before.items()), strategy


@pytest.mark.parametrize(
    "options",
    ({}, {"megatron_fsdp_grad_comm_dtype": torch.bfloat16}),
    ids=("fp32-comm", "bf16-comm"),
)
def test_an_infinity_on_one_rank_skips_the_step_on_all(options: dict[str, Any]) -> None:
    """The inf check sees every shard; the loss scale is halved, and the next step is taken."""
    run_ranks(_skips, 2, options)


def _modes(rank: int, world: int) -> None:
    device = init_megatron()
    case = CASE.but(fp16=False)
    data = batches(case, 0, rank, device)
    for strategy in STRATEGIES:
        reference: Any = None
        for fusion in (True, False):
            for average in (True, False):
                options = {"gradient_reduce_div_fusion": fusion, "average_in_collective": average}
                trainer = build_trainer(case, strategy, device, ddp=options)
                forward_backward(trainer, data)
                gradients = trainer.gradients()
                before = not (fusion or average)
                assert trainer.wrapper.engine.config.scale_before_sum is before
                reference = gradients if reference is None else reference
                check_gradients(gradients, reference, f"{strategy} {options}", bound=1e-6)


def test_scaling_modes_give_one_mean() -> None:
    """With 3 ranks 1/3 rounds, before the sum and after it; the mean is the same within that."""
    run_ranks(_modes, 3)
