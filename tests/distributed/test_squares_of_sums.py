"""Squares that reductions leave where they sum gradients, for the norm: against a norm that reads
every gradient, in training."""

from __future__ import annotations

import functools
import math
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.distributed import finalize_model_grads

from megatron_fsdp_adapter.megatron import clipping
from megatron_fsdp_adapter.sharding.one_pass_norm import OnePassSquares
from megatron_fsdp_adapter.sharding.squares_of_sums import SquaresOfSums
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
EXCHANGE = {
    "reduce_scatter_with_fp32_accumulation": True, "megatron_fsdp_grad_comm_dtype": torch.bfloat16
}
ZERO_3 = "optim_grads_params"


class Known:
    """Watches what of a trainer's gradients a norm knows, and has to read."""

    def __init__(self, trainer: Trainer) -> None:
        self.shards = distributed_optimizer(trainer).optimizer._fsdp_shards
        self.kernel = HostSquares()
        self.shards.squares = OnePassSquares(lambda device: self.kernel)
        params = [param for pairs in self.shards.pairs for param, _ in pairs]
        self.sums = self.shards.of_sums = SquaresOfSums([trainer.wrapper.engine], params)

    def take(self) -> int:
        """Of tensors that the norms since the last call have read."""
        read = sum(table.addresses.shape[1] for table in self.kernel.tables)
        self.kernel.tables.clear()
        return read


def _norm(trainer: Trainer) -> float:
    return float(clipping.norm_of(distributed_optimizer(trainer), None))


def _by_reading(trainer: Trainer) -> float:
    shards = distributed_optimizer(trainer).optimizer._fsdp_shards
    known, shards.of_sums = shards.of_sums, None
    try:
        return _norm(trainer)
    finally:
        shards.of_sums = known


def _trains_alike(rank: int, device: torch.device) -> None:
    for strategy, more in (
        (ZERO_3, {}), ("optim_grads", {}), ("optim", {}),
        (ZERO_3, {"fsdp_unsharded_budget_gib": 1000.0}),
        (ZERO_3, {"overlap_grad_reduce": False, "overlap_param_gather": False}),
    ):  # fmt: skip
        runs = []
        for is_known in (False, True):
            trainer = build_trainer(CASE, strategy, device, ddp={**EXCHANGE, **more})
            known = Known(trainer) if is_known else None
            data = [batches(CASE, number, rank, device) for number in range(3)]
            runs.append([train_step(trainer, one) for one in data])
            if known is not None:
                assert known.take() == 0, (strategy, more)
        for (loss, norm), (core_loss, core_norm) in zip(runs[1], runs[0], strict=True):
            assert math.isclose(norm, core_norm, rel_tol=1e-6) and core_norm > CASE.clip
            assert math.isclose(loss, core_loss, rel_tol=1e-5)


def _what_is_written_is_read(rank: int, device: torch.device) -> None:
    trainer = build_trainer(CASE, ZERO_3, device, ddp=EXCHANGE)
    known, optimizer = Known(trainer), distributed_optimizer(trainer)
    forward_backward(trainer, batches(CASE, 0, rank, device))
    before = _norm(trainer)
    assert known.take() == 0
    for pair in trainer.wrapper.engine.pairs:  # by any view of it
        own = pair.optimizer.grad._local_tensor.view(-1)[:1]
        own.add_(10.0)
        assert math.isclose(_norm(trainer), _by_reading(trainer), rel_tol=1e-6), pair.managed.fqns
        assert known.take() > 0 or own.numel() == 0
    assert _norm(trainer) > before * 2
    trainer.wrapper.zero_grad_buffer()
    forward_backward(trainer, batches(CASE, 1, rank, device))
    known.take()
    assert math.isclose(_norm(trainer), _by_reading(trainer), rel_tol=1e-6)
    known.take()
    with mock.patch.object(clipping, "clip_grad_by_total_norm_fp32", _scaled_unseen):
        clipping.clip(lambda *unused: None, optimizer, CASE.clip)
    known.take()
    assert math.isclose(_norm(trainer), CASE.clip, rel_tol=1e-3)
    assert known.take() > 0, "clipped gradients were not read"


def _scaled_unseen(held: list[Any], largest: float, norm: float, **unused: Any) -> None:
    """As kernels of Transformer Engine scale gradients."""
    for one in held:
        one.grad.data.mul_(largest / (norm + clipping.EPS))


def _others_finalise(rank: int, device: torch.device) -> None:
    """A function of the user's may write gradients by what torch does not see."""
    trainer = build_trainer(CASE, ZERO_3, device, ddp=EXCHANGE)
    known = Known(trainer)
    functions = {
        functools.partial(finalize_model_grads): False,
        (lambda *args, **more: finalize_model_grads(*args, **more)): True,
    }
    for function, reads in functions.items():
        trainer.wrapper.config.finalize_model_grads_func = function
        forward_backward(trainer, batches(CASE, 0, rank, device))
        _norm(trainer)
        assert bool(known.take()) is reads
        trainer.wrapper.config.finalize_model_grads_func = None  # a loop that does it by itself
        _norm(trainer)
        assert known.take() > 0
        trainer.wrapper.zero_grad_buffer()


def _part_of_a_group(rank: int, device: torch.device) -> None:
    """What a norm leaves out is of no group that counts as a whole."""
    trainer = build_trainer(CASE, ZERO_3, device, ddp=EXCHANGE)
    known = Known(trainer)
    forward_backward(trainer, batches(CASE, 0, rank, device))
    held = clipping.gradients(distributed_optimizer(trainer), None)
    for left_out in range(len(held)):
        some = held[:left_out] + held[left_out + 1 :]
        squares, rest = known.sums(some)
        total = sum(float(one.double().square().sum()) for one in rest)
        total += 0.0 if squares is None else float(squares)
        expected = sum(float(one.double().square().sum()) for one in some)
        assert math.isclose(total, expected, rel_tol=1e-6)


def _several_optimizers(rank: int, device: torch.device) -> None:
    """Groups of which each has a part are no one's; who asks last gets the squares."""
    trainer = build_trainer(CASE, ZERO_3, device, ddp=EXCHANGE)
    engine, optimizer = trainer.wrapper.engine, distributed_optimizer(trainer)
    params = [param for pairs in optimizer.optimizer._fsdp_shards.pairs for param, _ in pairs]
    before = Known(trainer).sums
    some, others = (SquaresOfSums([engine], half) for half in (params[::2], params[1::2]))
    forward_backward(trainer, batches(CASE, 0, rank, device))
    held = clipping.gradients(optimizer, None)
    expected = sum(float(one.double().square().sum()) for one in held)
    of_two = [sums(held) for sums in (some, others)]
    assert all(len(rest) < len(held) for _, rest in of_two) or rank
    first, rest = before(held)
    read = sum(float(one.double().square().sum()) for one in rest)
    assert math.isclose(read + float(first or 0.0), expected, rel_tol=1e-6)
    for squares, rest in of_two:
        read = sum(float(one.double().square().sum()) for one in rest)
        assert math.isclose(read + float(squares or 0.0), expected, rel_tol=1e-6)


def _in_turn(rank: int, world: int) -> None:
    device = init_megatron()
    for check in (
        _trains_alike, _what_is_written_is_read, _others_finalise, _part_of_a_group,
        _several_optimizers,
    ):  # fmt: skip
        check(rank, device)


def test_norms_are_those_of_the_gradients_whoever_writes_them() -> None:
    run_ranks(_in_turn, 2)


@pytest.mark.parametrize(
    ("options", "fp16", "expected"),
    [({}, False, True), ({}, True, False), ({"tensor_model_parallel_size": 2}, False, False),
     ({"pipeline_model_parallel_size": 2}, False, False)],
)  # fmt: skip
def test_core_s_collectives_in_place_and_a_scaler_switch_it_off(
    options: dict[str, int], fp16: bool, expected: bool
) -> None:
    sizes = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, **options}
    chunk: Any = SimpleNamespace(config=SimpleNamespace(**sizes))
    asked = SimpleNamespace(fp16=fp16)
    assert clipping.writes_gradients_in_sight([chunk], asked) is expected
