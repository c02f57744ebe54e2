"""What a model takes of a device's memory, from the allocator's records, and by the formula."""

from __future__ import annotations

import gc
from collections.abc import Mapping

import torch

from megatron_fsdp_adapter.core.config import STRATEGIES
from megatron_fsdp_adapter.plan.memory import Precision, model_bytes, unit_bytes
from tests.lib.gpt.gpt import Case, Trainer, batches, build_trainer, train_step

SMALL = 64 * 1024
"""Bytes beside the formula: rotary frequencies, Adam's step counts, flags of fused kernels."""


def run_steps(trainer: Trainer, rank: int, count: int, device: torch.device) -> None:
    for number in range(count):
        train_step(trainer, batches(trainer.case, number % 2, rank, device))


def forget_grads(trainer: Trainer) -> None:
    trainer.wrapper.zero_grad_buffer()
    trainer.optimizer.zero_grad()
    torch.cuda.synchronize()


def warm_libraries(case: Case, rank: int, device: torch.device) -> None:
    """cuBLAS workspaces and the like are allocated once and stay."""
    run_steps(build_trainer(case, "optim", device), rank, 1, device)
    gc.collect()
    torch.cuda.synchronize()


def requested_now() -> int:
    """Bytes that tensors asked for. What the allocator counts as allocated is more by up to 1 MiB
    a tensor, where it hands out a cached block without splitting it."""
    return torch.cuda.memory_stats()["requested_bytes.all.current"]


def formula(trainer: Trainer, rank: int, precision: Precision) -> dict[str, int]:
    """Bytes by kind from the layouts alone."""
    engine = trainer.wrapper.engine
    row = STRATEGIES[str(trainer.strategy)]
    every = []
    for unit in engine.units:
        every.append(unit_bytes([group.layout for group in unit.groups], row, precision, rank))
    return model_bytes(every[-1], every[:-1])


def allocator_counts() -> Mapping[str, int]:
    torch.cuda.synchronize()
    stats = torch.cuda.memory_stats()
    return {
        "requested": stats["requested_bytes.all.current"],
        "reserved": stats["reserved_bytes.all.current"],
        "device allocations": stats["num_device_alloc"],
        "device frees": stats["num_device_free"],
        "retries": stats["num_alloc_retries"],
    }


def stays_flat(trainer: Trainer, rank: int, count: int) -> str:
    """So many steps allocate nothing new from the device, and hold the same after the last."""
    device = torch.device("cuda", torch.cuda.current_device())
    run_steps(trainer, rank, 4, device)
    early = allocator_counts()
    run_steps(trainer, rank, count, device)
    late = allocator_counts()
    assert early == late, f"{early} became {late}"
    return str(late)
