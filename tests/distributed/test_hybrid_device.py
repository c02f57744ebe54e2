"""Core's optimizer offload on our shards, beside stock DDP with the same.

Without a GPU the host stands for both memories (`hybrid_device.py`).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

from tests.distributed.checks import (
    check_run,
    check_run_bits,
    check_step,
    free_run,
    recorded_step,
    steps_from_reference,
)
from tests.distributed.gpt import (
    STRATEGIES,
    Case,
    Trainer,
    batches,
    build_trainer,
    distributed_optimizer,
    forward_backward,
    init_megatron,
    load_weights,
    train_step,
)
from tests.distributed.hybrid_device import offload, two_memories
from tests.distributed.launch import run_ranks

CASE = Case(
    num_layers=1, hidden=12, heads=2, ffn=20, vocab=23, microbatches=2, clip=0.5, adam_eps=1e-3
)


def _inner(trainer: Trainer) -> Any:
    return distributed_optimizer(trainer).optimizer


def _offloaded(trainer: Trainer) -> int:
    """Elements that the host updates on this rank."""
    inner = _inner(trainer)
    assert isinstance(inner, HybridDeviceOptimizer)
    return sum(copy.numel() for copy in inner.cpu_copys_map_gpu_param)


def _like_stock(rank: int, world: int, bf16: bool) -> None:
    device, case = init_megatron(), CASE.but(bf16=bf16)
    with two_memories():
        for fraction, overlap in ((0.5, True), (1.0, False)):
            options = offload(fraction, overlap)
            # Core's constructor refuses the shards of a float32 model: they are no leaves.
            of_stock = options if bf16 else {}
            stock = build_trainer(case, None, device, optimizer=of_stock)
            ours = {s: build_trainer(case, s, device, optimizer=options) for s in STRATEGIES}
            assert all(_offloaded(trainer) > 0 for trainer in ours.values())
            for strategy, mine, expected in steps_from_reference(stock, ours, rank, 2, device):
                check_step(mine, expected, f"{strategy}, {fraction}, step from the same weights")
            again = build_trainer(case, None, device, optimizer=of_stock)
            theirs = free_run(again, rank, 3, device)
            for strategy in STRATEGIES:
                fresh = build_trainer(case, strategy, device, optimizer=options)
                check_run(free_run(fresh, rank, 3, device), theirs, strategy)


@pytest.mark.parametrize("bf16", [False, True])
def test_it_trains_like_stock_ddp_with_the_same_offload(bf16: bool) -> None:
    """All strategies; every step is clipped, biases and norms have no weight decay."""
    run_ranks(_like_stock, 2, bf16)


def _any_fraction(rank: int, world: int) -> None:
    device, case = init_megatron(), CASE.but(bf16=True)
    with two_memories():
        for strategy in STRATEGIES:
            runs, elements = [], []
            for fraction in (0.0, 0.4, 1.0):
                trainer = build_trainer(case, strategy, device, optimizer=offload(fraction))
                elements.append(_offloaded(trainer))
                runs.append(free_run(trainer, rank, 3, device))
            assert 0 == elements[0] < elements[1] < elements[2]
            held = [p._local_tensor.numel() for p in trainer.wrapper.parameters()]
            assert elements[2] == sum(held)
            for run in runs[1:]:
                check_run_bits(run, runs[0], strategy)


def test_any_fraction_gives_the_same_bits() -> None:
    run_ranks(_any_fraction, 2)


def _written_elsewhere(rank: int, world: int) -> None:
    """A load between steps reaches the copies that the host updates; a step that was left out
    changes nothing."""
    device = init_megatron()
    case = CASE.but(fp16=True)
    with two_memories():
        one, other = (
            build_trainer(case, "optim_grads_params", device, optimizer=offload(fraction))
            for fraction in (0.0, 1.0)
        )
        start = one.params()
        for trainer in (one, other):
            train_step(trainer, batches(case, 0, rank, device))
        load_weights(one, start)
        load_weights(other, start)
        mine, theirs = (
            recorded_step(t, batches(case, 1, rank, device)) for t in (other, one)
        )
        check_run_bits([mine], [theirs], "after a load")
        before = other.params()
        forward_backward(other, batches(case, 2, rank, device))
        for param in other.wrapper.parameters():
            param.grad._local_tensor.fill_(float("inf"))  # type: ignore[union-attr]
        assert other.optimizer.step()[0] is False
        after = other.params()
        assert all(torch.equal(after[name], before[name]) for name in before)


def test_what_is_written_between_steps_reaches_the_host_and_skipped_steps_change_nothing() -> None:
    run_ranks(_written_elsewhere, 2)
