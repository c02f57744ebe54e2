"""Show 4: an infinity in one gradient of one rank skips the step on all. When gradients are
scaled: tests/engine/test_topology_config.py."""

from __future__ import annotations

import math

import pytest
import torch

from tests.distributed.checks import check_same_bits
from tests.distributed.gpt import (
    STRATEGIES,
    Case,
    batches,
    build_trainer,
    forward_backward,
    init_megatron,
)
from tests.distributed.mishaps import Spoiler
from tests.distributed.shared_ranks import on_ranks

CASE = Case(
    num_layers=1, hidden=12, heads=2, ffn=20, vocab=23, microbatches=2, fp16=True, loss_scale=256.0
)
NAME = "decoder.layers.0.mlp.linear_fc1.weight"


@pytest.mark.parametrize("comm", (None, torch.bfloat16), ids=("fp32-comm", "bf16-comm"))
@on_ranks(2)
def test_an_infinity_on_one_rank_skips_the_step_on_all(
    rank: int, comm: torch.dtype | None
) -> None:
    """The inf check sees every shard; the loss scale is halved, and the next step is taken."""
    device = init_megatron()
    for strategy in STRATEGIES:
        spoiler = Spoiler(NAME)
        options = {"megatron_fsdp_grad_comm_dtype": comm}
        trainer = build_trainer(CASE, strategy, device, spoiler.attach, ddp=options)
        before, scale = trainer.params(), trainer.optimizer.get_loss_scale().item()
        spoiler.value = math.inf
        forward_backward(trainer, batches(CASE, 0, rank, device))
        stepped, _, _ = trainer.optimizer.step()
        assert not stepped, strategy
        assert trainer.optimizer.get_loss_scale().item() == scale / 2, strategy
        check_same_bits(trainer.params(), before, strategy)
        spoiler.value = None
        forward_backward(trainer, batches(CASE, 1, rank, device))
        stepped, norm, _ = trainer.optimizer.step()
        assert stepped and math.isfinite(norm), strategy
        moved = trainer.params()
        assert all(not torch.equal(value, moved[name]) for name, value in before.items()), strategy
