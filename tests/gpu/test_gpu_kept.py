"""Units that stay whole over the microbatches of a step, on GPUs: kept weights change no bit, and
kept gradients have the bits of `optim`."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from megatron_fsdp_adapter.sharding.unsharded_budget import GIB, OPTION
from tests.distributed.checks import check_run_bits, free_run
from tests.distributed.gpt import Case, build_trainer, init_megatron
from tests.gpu.gpu_ranks import Check, Outcomes

CASE = Case(
    num_layers=5, hidden=256, heads=4, ffn=640, vocab=1000, seq=128, batch=2, swiglu=True,
    bf16=True, microbatches=3,
)  # fmt: skip
ZERO_1, ZERO_3 = "optim", "optim_grads_params"
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "slots": {"fsdp_double_buffer": True},
    "copy engines": {
        "fsdp_copy_engine_all_gather": True, "fsdp_copy_engine_reduce_scatter": True
    },
    "copy engines, all registered": {"fsdp_copy_engine_all_gather": True, "nccl_ub": True},
}


def _run(rank: int, strategy: str, ddp: dict[str, Any]) -> tuple[Any, int, Any]:
    """Three steps; the bytes of all weights whole; what was kept."""
    device = init_megatron()
    trainer = build_trainer(CASE, strategy, device, ddp=ddp)
    groups = trainer.wrapper.engine.groups
    nbytes = sum(full.nbytes for group in groups for full in group.weights)
    steps, kept = free_run(trainer, rank, 3, device), trainer.wrapper._kept
    del trainer, groups
    gc.collect()
    return steps, nbytes, kept


def same_bits(rank: int, world: int, name: str) -> str:
    """Two ranks' sums are the same in either order."""
    options = OPTIONS[name]
    sharded, nbytes, none = _run(rank, ZERO_3, options)
    weights, _, kept = _run(rank, ZERO_3, {**options, OPTION: nbytes / GIB})
    assert (none.weights, kept.weights, kept.grads) == (0, len(kept.rows), 0), kept
    check_run_bits(weights, sharded, f"{name}, weights kept")
    some, _, kept = _run(rank, ZERO_3, {**options, OPTION: 1.5 * nbytes / GIB})
    assert 0 < kept.grads < kept.weights == len(kept.rows), kept
    assert some[0].loss == sharded[0].loss and some[-1].norm > 0
    everything, _, kept = _run(rank, ZERO_3, {**options, OPTION: 1.0})
    assert kept.grads == len(kept.rows)
    whole, _, _ = _run(rank, ZERO_1, {})
    check_run_bits(everything, whole, f"{name}, everything kept")
    return f"{kept.weights} units, last loss {whole[-1].loss:.4f}"


CHECKS = {name: Check(same_bits, (name,)) for name in OPTIONS}
OUTCOMES = Outcomes(CHECKS, timeout_s=120.0)


@pytest.mark.parametrize("name", CHECKS)
def test_on_two_gpus(name: str) -> None:
    OUTCOMES.expect(name)
