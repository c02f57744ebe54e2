"""Exports of models whose main weights are in host memory."""

from __future__ import annotations

import pytest
import torch

from megatron_fsdp_adapter import export_weights, release_memory, return_memory
from megatron_fsdp_adapter.sharding import unit_copies
from tests.distributed.gpt import (
    STRATEGIES,
    Case,
    Trainer,
    batches,
    build_trainer,
    init_megatron,
    load_weights,
    train_step,
)
from tests.distributed.launch import run_ranks

CASE = Case(num_layers=2, hidden=12, heads=2, ffn=20, vocab=23, microbatches=2, bf16=True)
OFFLOAD = {"chunked_optimizer_state_offload": True}


def check(trainer: Trainer, label: str) -> None:
    mains = {name.removeprefix("module."): value for name, value in trainer.params().items()}
    for dtype in (torch.bfloat16, None):
        found = dict(export_weights(trainer.wrapper, dtype=dtype))
        assert found.keys() == mains.keys(), label
        for name, value in found.items():
            assert torch.equal(value, mains[name].to(value.dtype)), (label, dtype, name)


def from_host(trainer: Trainer) -> bool:
    """Whether an export in bf16 reads main weights in host memory."""
    groups = trainer.wrapper.engine.groups
    chosen = [unit_copies._source(group, torch.bfloat16) for group in groups]
    return any(one is group.main_segments for one, group in zip(chosen, groups, strict=True))


def _exports(rank: int, world: int, strategy: str) -> None:
    device = init_megatron()
    trainer = build_trainer(CASE, strategy, device, ddp=OFFLOAD)
    assert all(group.main_on_host for group in trainer.wrapper.engine.groups)
    for step in range(3):
        train_step(trainer, batches(CASE, step, rank, device))
        assert not from_host(trainer), "the step has left them on the device"
        check(trainer, f"step {step}")
        load_weights(trainer, {name: value * 0.5 for name, value in trainer.params().items()})
        check(trainer, f"loaded after step {step}")
        release_memory(trainer.wrapper, trainer.optimizer, keep="main_weights")
        dict(export_weights(trainer.wrapper))
        return_memory(trainer.wrapper, trainer.optimizer)
        check(trainer, f"returned after step {step}")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_exported_tensors_are_the_main_weights(strategy: str) -> None:
    run_ranks(_exports, 2, strategy, timeout=300)
