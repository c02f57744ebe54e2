"""Neighboring layers as one unit on GPUs: the bits of units of their own."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from megatron_fsdp_adapter.megatron.options.unit_grouping import UNIT_NUMEL
from tests.distributed.checks import check_run_bits, free_run
from tests.distributed.gpt import Case, build_trainer, init_megatron
from tests.gpu.gpu_ranks import Check, Outcomes

CASE = Case(
    num_layers=5, hidden=256, heads=4, ffn=640, vocab=1000, seq=128, batch=2, swiglu=True,
    bf16=True, microbatches=2, clip=1e9,
)  # fmt: skip
TWO_LAYERS = 1_000_000
"""Elements: more than one layer has, fewer than two."""
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {}, "by default": {},
    "slots": {"fsdp_double_buffer": True},
    "copy engines": {
        "fsdp_copy_engine_all_gather": True, "fsdp_copy_engine_reduce_scatter": True
    },
}


MANY = CASE.but(num_layers=16, microbatches=1)
"""Of so many layers two are joined to one unit where nobody says."""
SIZES: dict[str, tuple[Case, tuple[int | None, int | None], int]] = {
    "by default": (MANY, (None, 0), 8),
}
"""Of a check: the case, the two sizes, and how many units more there are by the second."""


def trains_alike(rank: int, world: int, name: str) -> str:
    """Two ranks' sums are the same in either order. Norms are sums over other rows, so that nothing
    may be clipped by them."""
    device, runs, counts = init_megatron(), [], []
    case, numels, fewer = SIZES.get(name, (CASE, (TWO_LAYERS, None), 2))
    for numel in numels:
        ddp = {**OPTIONS[name], UNIT_NUMEL: numel}
        trainer = build_trainer(case, "optim_grads_params", device, ddp=ddp)
        counts.append(len(trainer.wrapper.engine.units))
        runs.append(free_run(trainer, rank, 3, device))
        del trainer
        gc.collect()
    assert counts[0] == counts[1] - fewer, counts
    check_run_bits(runs[0], runs[1], name)
    return f"{counts} units, last loss {runs[0][-1].loss:.4f}"


CHECKS = {name: Check(trains_alike, (name,)) for name in OPTIONS}
OUTCOMES = Outcomes(CHECKS, timeout_s=100.0)


@pytest.mark.parametrize("name", CHECKS)
def test_on_two_gpus(name: str) -> None:
    OUTCOMES.expect(name)
