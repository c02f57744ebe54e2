"""`fsdp_grad_comm_fp8_blocks`: training with gradients that travel in 8-bit blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_fsdp_adapter.cli import estimate
from megatron_fsdp_adapter.sharding.budget import OPTION as BUDGET
from tests.distributed.checks import recorded_step
from tests.distributed.gpt import Case, batches, build_trainer, init_megatron
from tests.distributed.launch import run_ranks

pytestmark = pytest.mark.once

BLOCKS = "fsdp_grad_comm_fp8_blocks"
CASE = Case(bf16=True, microbatches=2, adam_eps=1e-3)
STRATEGIES = ("optim", "optim_grads", "optim_grads_params")


def _steps(rank: int, device: torch.device, strategy: str, ddp: dict[str, Any]) -> list[Any]:
    trainer = build_trainer(CASE, strategy, device, ddp=ddp)
    return [recorded_step(trainer, batches(CASE, step, rank, device)) for step in range(4)]


def _train(rank: int, world: int) -> dict[str, Any]:
    device, found = init_megatron(), {}
    for strategy in STRATEGIES:
        exact = _steps(rank, device, strategy, {})
        blocks = _steps(rank, device, strategy, {BLOCKS: True})
        pairs = [(blocks[0].gradients[name], value) for name, value in exact[0].gradients.items()]
        off = [float((one - other).norm() / other.norm()) for one, other in pairs if other.norm()]
        losses = [abs(a.loss / b.loss - 1) for a, b in zip(blocks, exact, strict=True)]
        found[strategy] = (losses[0], max(off), max(losses))
    slots = {BLOCKS: True, "fsdp_double_buffer": True}
    same = [_steps(rank, device, "optim_grads_params", ddp) for ddp in ({BLOCKS: True}, slots)]
    found["slots"] = [step.loss for step in same[0]] == [step.loss for step in same[1]]
    kept = _steps(rank, device, "optim_grads_params", {**slots, BUDGET: 1.0})
    whole = _steps(rank, device, "optim", {BLOCKS: True})
    found["kept"] = [step.loss for step in kept] == [step.loss for step in whole]
    return found


def test_training_in_blocks_follows_training_in_float32():
    """The first loss is the same; gradients are off by what 3 bits of a fraction leave, losses of
    further steps by less than a percent."""
    for found in run_ranks(_train, 2, timeout=300):
        for strategy in STRATEGIES:
            first, off, losses = found[strategy]
            assert first == 0.0 and 0.0 < off < 0.2 and losses < 1e-2, (strategy, found)
        assert found["slots"] and found["kept"], found


def test_estimate_counts_what_is_sent_and_received(capsys: Any) -> None:
    words = ["--preset", "llama3-8b", "--data-parallel-size", "2"]
    words += ["--data-parallel-sharding-strategy", "optim_grads_params"]
    shown = []
    for option in ([], ["--fsdp-grad-comm-fp8-blocks"]):
        assert estimate.main([*words, *option]) == 0
        shown.append(capsys.readouterr().out)
    assert "8-bit blocks" in shown[1] and "8-bit blocks" not in shown[0]
