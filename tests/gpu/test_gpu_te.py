"""Transformer Engine's layers and its FusedAdam under our wrapper and under stock DDP."""

from __future__ import annotations

import importlib.util
import os
from typing import Any
from unittest import mock

import pytest
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

from megatron_fsdp_adapter.megatron.compat import patches
from megatron_fsdp_adapter.megatron.compat.table import FUSED_WGRAD
from tests.distributed import gpt
from tests.distributed.checks import check_loss, check_norm, check_run_bits, free_run
from tests.distributed.gpt import STRATEGIES, Case, build_trainer, init_megatron
from tests.gpu.gpu_ranks import Check, Outcomes

CASE = Case(
    num_layers=2, hidden=128, heads=4, ffn=256, vocab=256, seq=64, batch=2, bf16=True, swiglu=True
)
FUSED = CASE.but(fused=True, microbatches=3)
LOOSE = 1e-3
"""Relative, of losses and norms over 3 bf16 steps with TE's kernels."""


def _te_run(strategy: str | None, case: Case, rank: int) -> list[Any]:
    device = init_megatron()
    spec = get_gpt_layer_with_transformer_engine_spec
    with mock.patch.object(gpt, "get_gpt_layer_local_spec", spec):
        trainer = build_trainer(case, strategy, device)
    return free_run(trainer, rank, 3, device)


def _check_weights(ours: Any, reference: Any, label: str, steps: int) -> None:
    """Within 2% of how far Adam can have moved each tensor, lr an element and step. Relative to
    the weights would be wrong: one flipped bf16 rounding changes gradients of 1e-3, and Adam
    makes a full step of a gradient near zero whatever its size."""
    for name, expected in reference.items():
        moved = CASE.lr * steps * expected.numel() ** 0.5
        error = (ours[name].double() - expected.double()).norm().item()
        assert error <= 0.02 * moved, f"{label}: {name} is off by {error:.2e}, moved {moved:.2e}"


def trains_like_ddp(rank: int, world: int, strategy: str, case: Case = CASE) -> str:
    """Three steps give the losses, norms and weights of stock DDP. Weight gradients may be written
    into the buckets; apex, which most machines lack, is replaced for the output layer then."""
    if case.fused:
        patches.install(FUSED_WGRAD)
    theirs, ours = (_te_run(kind, case, rank) for kind in (None, strategy))
    for number, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        label = f"{strategy} step {number}, {case}"
        check_loss(mine.loss, other.loss, label, LOOSE)
        check_norm(mine.norm, other.norm, label, LOOSE)
        _check_weights(mine.weights, other.weights, label, steps=number + 1)
    return f"losses {[step.loss for step in ours]} and {[step.loss for step in theirs]}"


def same_run_twice(rank: int, world: int) -> None:
    runs = [_te_run("optim_grads_params", CASE, rank) for _ in range(2)]
    check_run_bits(runs[0], runs[1], "TE, optim_grads_params")


CHECKS = {
    **{name: Check(trains_like_ddp, (name,)) for name in STRATEGIES},
    **{f"fused_{name}": Check(trains_like_ddp, (name, FUSED)) for name in STRATEGIES},
    "twice": Check(same_run_twice),
}
OUTCOMES = Outcomes(CHECKS, timeout_s=110.0)
os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"  # the ranks inherit it
HAS_TE = importlib.util.find_spec("transformer_engine") is not None


@pytest.mark.skipif(not HAS_TE, reason="Transformer Engine is not installed")
@pytest.mark.parametrize("name", CHECKS)
def test_transformer_engine(name: str) -> None:
    OUTCOMES.expect(name)
