"""SGD on uneven shards of two ranks, with empty ones: like stock DDP with whole weights, and the
same state on every rank."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core import optimizer as core_optimizer

from tests.adapter.test_sgd import FusedSGD, sgd_trainer, whole_weights
from tests.distributed.gpt import STRATEGIES, Case, batches, init_megatron, train_step
from tests.distributed.launch import run_ranks

WORLD, STEPS = 2, 3
CASE = Case(num_layers=2, hidden=12, heads=2, ffn=20, vocab=23, microbatches=2, lr=0.05, clip=0.5)


def _compare(rank: int, world: int, momentum: float, bf16: bool) -> None:
    device, case = init_megatron(), CASE.but(bf16=bf16)
    for strategy in STRATEGIES:
        stock, ours = (sgd_trainer(case, kind, device, momentum) for kind in (None, strategy))
        for step in range(STEPS):
            data = batches(case, step, rank, device)
            (loss, norm), (our_loss, our_norm) = (train_step(t, data) for t in (stock, ours))
            assert our_loss == pytest.approx(loss, rel=1e-5), (strategy, step)
            assert our_norm == pytest.approx(norm, rel=1e-4), (strategy, step)
            expected, found = whole_weights(stock), whole_weights(ours)
            for name, weight in found.items():
                torch.testing.assert_close(weight, expected[name], rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_two_ranks_train_like_stock_ddp(momentum: float) -> None:
    run_ranks(_compare, WORLD, momentum, False)


def _keys(rank: int, world: int, fused: bool) -> None:
    device = init_megatron()
    said = {"distrib_optim_sharding_type": "fsdp_dtensor"}
    cls = FusedSGD if fused else core_optimizer.SGD
    with mock.patch.object(core_optimizer, "SGD", cls):
        trainer = sgd_trainer(CASE, "optim_grads_params", device, 0.9)
        empty = [p for p in trainer.wrapper.parameters() if p._local_tensor.numel() == 0]
        for step in range(2):
            state = trainer.optimizer.sharded_state_dict({}, metadata=said)["state"]
            mine = {name: sorted(entry) for name, entry in state.items()}
            everyone: list[object] = [None] * world
            dist.all_gather_object(everyone, (mine, len(empty)))
            assert everyone[0][0] == everyone[1][0]  # type: ignore[index]
            assert any(count for _, count in everyone)  # type: ignore[misc]
            assert set(map(tuple, mine.values())) == {("momentum_buffer",)}
            train_step(trainer, batches(CASE, step, rank, device))


@pytest.mark.parametrize("fused", [False, True])
def test_every_rank_has_the_same_state(fused: bool) -> None:
    run_ranks(_keys, WORLD, fused)
