"""Show 4: an infinity in one gradient of one rank skips the step on all; scaling modes agree."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.distributed.checks import Step, check_gradients, check_same_bits
from tests.distributed.gpt import (
    STRATEGIES,
    Case,
    batches,
    build_trainer,
    forward_backward,
    init_megatron,
)
from tests.distributed.shared_ranks import on_ranks
from tests.distributed.variants import Comparison, Variant, compare, marked

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


@pytest.mark.parametrize("comm", (None, torch.bfloat16), ids=("fp32-comm", "bf16-comm"))
@on_ranks(2)
def test_an_infinity_on_one_rank_skips_the_step_on_all(
    rank: int, comm: torch.dtype | None
) -> None:
    """The inf check sees every shard; the loss scale is halved, and the next step is taken."""
    device = init_megatron()
    for strategy in STRATEGIES:
        infinity = Infinity()
        options = {"megatron_fsdp_grad_comm_dtype": comm}
        trainer = build_trainer(CASE, strategy, device, infinity.attach, ddp=options)
        before, scale = trainer.params(), trainer.optimizer.get_loss_scale().item()
        infinity.on = True
        forward_backward(trainer, batches(CASE, 0, rank, device))
        stepped, _, _ = trainer.optimizer.step()
        assert not stepped, strategy
        assert trainer.optimizer.get_loss_scale().item() == scale / 2, strategy
        check_same_bits(trainer.params(), before, strategy)
        infinity.on = False
        forward_backward(trainer, batches(CASE, 1, rank, device))
        stepped, norm, _ = trainer.optimizer.step()
        assert stepped and math.isfinite(norm), strategy
        moved = trainer.params()
        assert all(not torch.equal(value, moved[name]) for name, value in before.items()), strategy


def _one_mean(ours: Step, reference: Step, label: str) -> None:
    check_gradients(ours.gradients, reference.gradients, label, 1e-6)


def scales_first(ours: Any, reference: Any, strategy: str) -> None:
    """Where neither option is on."""
    config = ours.wrapper.ddp_config
    first = not (config.gradient_reduce_div_fusion or config.average_in_collective)
    assert ours.wrapper.engine.config.scale_before_sum is first


MODES = tuple(
    Variant(
        f"fused {fusion}, averaged {average}", world=3, steps=1,
        compare=Comparison(*[_one_mean] * 2),
        case={"num_layers": 1, "hidden": 12, "heads": 2, "ffn": 20, "vocab": 23, "microbatches": 2},
        ddp={"gradient_reduce_div_fusion": fusion, "average_in_collective": average},
        reference={
            "strategy": "own",
            "ddp": {"gradient_reduce_div_fusion": True, "average_in_collective": True},
        },
        expect=scales_first,
    )
    for fusion, average in ((True, False), (False, True), (False, False))
)  # fmt: skip


@pytest.mark.parametrize("row", marked(MODES))
@on_ranks()
def test_scaling_modes_give_one_mean(row: Variant, rank: int, seed: int) -> None:
    """With 3 ranks 1/3 rounds, before the sum and after it; the mean is the same within that."""
    compare(row, rank, seed)
