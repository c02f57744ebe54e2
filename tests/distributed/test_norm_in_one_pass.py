"""The gradient norm from a kernel that stands for ours, against core's own, in training."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import torch
from megatron.core.optimizer import clip_grads

from megatron_fsdp_adapter.megatron import clipping
from megatron_fsdp_adapter.sharding.one_pass_norm import OnePassSquares
from tests.distributed.gpt import (
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
from tests.sharding.host_squares import HostSquares

CASE = Case(num_layers=2, hidden=12, heads=2, ffn=20, vocab=23, microbatches=2, clip=0.05)


def _trainer(device: torch.device, strategy: str, kernel: HostSquares | None) -> Trainer:
    trainer = build_trainer(CASE, strategy, device)
    shards = distributed_optimizer(trainer).optimizer._fsdp_shards
    shards.squares = OnePassSquares(lambda device: kernel)
    return trainer


def _train_alike(rank: int, device: torch.device) -> None:
    """Also where the kernel is on one rank alone, which is then as good as core's function."""
    for strategy in ("no_shard", "optim_grads_params"):
        runs = []
        for ours in (lambda rank: False, lambda rank: True, lambda rank: rank == 1):
            kernel = HostSquares()
            trainer = _trainer(device, strategy, kernel if ours(rank) else None)
            data = [batches(CASE, number, rank, device) for number in range(3)]
            runs.append([train_step(trainer, one) for one in data])
            # Without sharding the first rank has all that is counted.
            has_some = strategy != "no_shard" or rank == 0
            assert len(kernel.tables) == (3 if ours(rank) and has_some else 0)
        for found in runs[1:]:
            for step, core in zip(found, runs[0], strict=True):
                assert type(step[1]) is type(core[1])
                assert math.isclose(step[1], core[1], rel_tol=1e-6) and core[1] > CASE.clip
                assert math.isclose(step[0], core[0], rel_tol=1e-5)


def _of_the_type_of_cores(rank: int, device: torch.device) -> None:
    """A number, or a tensor where core can go on with one; of a rank without gradients, too; what
    is no number on any rank is none on all."""
    trainer = _trainer(device, "optim_grads_params", HostSquares())
    optimizer = distributed_optimizer(trainer)
    forward_backward(trainer, batches(CASE, 0, rank, device))
    number = clipping.norm_of(optimizer, None)
    assert isinstance(number, float)
    on_device = mock.patch.object(clip_grads, "multi_tensor_scale_tensor_impl", 1, create=True)
    with on_device:
        found = clipping.norm_of(optimizer, None)
    assert found.shape == (1,) and found.dtype == torch.float32
    torch.testing.assert_close(found.item(), number)
    held = clipping.gradients(optimizer, None)

    def mine(of: int) -> Any:
        return mock.patch.object(clipping, "gradients", lambda *asked: held if rank == of else [])

    parts = []
    for of in (0, 1):
        with mine(of):
            parts.append(clipping.norm_of(optimizer, None))
    assert all(parts) and math.isclose(math.hypot(*parts), number, rel_tol=1e-6)
    for wrong in (math.inf, math.nan):
        if rank == 1:
            held[-1].view(-1)[-1] = wrong
        assert repr(clipping.norm_of(optimizer, None)) == repr(wrong)


def _in_turn(rank: int, world: int) -> None:
    device = init_megatron()
    _train_alike(rank, device)
    _of_the_type_of_cores(rank, device)


def test_the_norm_is_cores_with_the_kernel_on_all_ranks_or_on_some() -> None:
    run_ranks(_in_turn, 2)
