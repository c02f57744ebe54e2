"""FP8 compute of Transformer Engine with bf16 parameters, under our wrapper and under stock DDP.

    python -m pytest -q -rA tests/gpu/test_gpu_fp8.py      (two GPUs of the Hopper kind or newer)
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

from tests.distributed import gpt
from tests.distributed.checks import check_loss, check_norm, check_run_bits, free_run
from tests.distributed.gpt import (
    STRATEGIES,
    Case,
    Trainer,
    batches,
    build_trainer,
    init_megatron,
    model_config,
    train_step,
)
from tests.gpu.gpu_ranks import Check, Outcomes

CASE = Case(
    num_layers=2, hidden=128, heads=4, ffn=256, vocab=256, seq=64, batch=2, bf16=True, swiglu=True
)
WIDE = CASE.but(num_layers=4, hidden=1024, heads=8, ffn=4096, seq=128)
RECIPES = ("delayed", "tensorwise", "blockwise")
STEPS = 4
FIRST, LATER = 2e-3, 2e-2
"""Relative, of loss and norm of the first step, which starts from equal weights, and of later ones:
a bf16 rounding that flips can move a whole tensor's FP8 scale."""


@contextmanager
def fp8_layers(recipe: str) -> Iterator[None]:
    """Inside, models are made of TE's layers and compute in FP8."""

    def config(case: Case) -> Any:
        made = model_config(case)
        made.fp8, made.fp8_recipe = "hybrid", recipe
        made.fp8_amax_history_len, made.fp8_amax_compute_algo = 16, "max"
        return made

    spec = get_gpt_layer_with_transformer_engine_spec
    with (
        mock.patch.object(gpt, "get_gpt_layer_local_spec", spec),
        mock.patch.object(gpt, "model_config", config),
    ):
        yield


def _trainer(strategy: str | None, recipe: str, case: Case, device: torch.device) -> Trainer:
    with fp8_layers(recipe):
        return build_trainer(case, strategy, device)


def trains_like_ddp(rank: int, world: int, strategy: str, recipe: str) -> str:
    """With one microbatch where sharded weights are quantized anew in each: delayed scaling then
    looks at a history of other lengths than stock DDP's, which quantizes once a step."""
    device = init_megatron()
    again = (strategy, recipe) == ("optim_grads_params", "delayed")
    case = CASE.but(microbatches=1) if again else CASE
    theirs = free_run(_trainer(None, recipe, case, device), rank, STEPS, device)
    ours = free_run(_trainer(strategy, recipe, case, device), rank, STEPS, device)
    for number, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        label, bound = f"{strategy}, {recipe}, step {number}", FIRST if number == 0 else LATER
        check_loss(mine.loss, other.loss, label, bound)
        check_norm(mine.norm, other.norm, label, bound)
    return f"losses {[s.loss for s in ours]} and {[s.loss for s in theirs]}"


def computes_in_fp8(rank: int, world: int) -> str:
    """The same step in bf16 has another loss: what is compared above is FP8."""
    device = init_megatron()
    spec = get_gpt_layer_with_transformer_engine_spec
    with mock.patch.object(gpt, "get_gpt_layer_local_spec", spec):
        bf16 = build_trainer(CASE, "optim_grads_params", device)
    fp8 = _trainer("optim_grads_params", "tensorwise", CASE, device)
    losses = [train_step(trainer, batches(CASE, 0, rank, device))[0] for trainer in (bf16, fp8)]
    assert losses[0] != losses[1] and abs(losses[0] - losses[1]) < 0.05 * losses[0], losses
    return str(losses)


def same_run_twice(rank: int, world: int) -> None:
    device = init_megatron()
    runs = [
        free_run(_trainer("optim_grads_params", "tensorwise", CASE, device), rank, STEPS, device)
        for _ in range(2)
    ]
    check_run_bits(runs[0], runs[1], "FP8, optim_grads_params")


def keeps_no_fp8_model(rank: int, world: int) -> str:
    """Between steps a sharded model in FP8 holds what it holds in bf16 and TE's amax histories,
    not the bytes of its weights in FP8; no layer has a workspace of quantized weights."""
    device = init_megatron()
    held = {}
    for recipe in (None, "delayed"):
        before = torch.cuda.memory_stats()["requested_bytes.all.current"]
        if recipe is None:
            spec = get_gpt_layer_with_transformer_engine_spec
            with mock.patch.object(gpt, "get_gpt_layer_local_spec", spec):
                trainer = build_trainer(WIDE, "optim_grads_params", device)
        else:
            trainer = _trainer("optim_grads_params", recipe, WIDE, device)
        for step in range(2):
            train_step(trainer, batches(WIDE, step, rank, device))
        trainer.wrapper.zero_grad_buffer()
        trainer.wrapper.engine.gather.release_all()
        torch.cuda.synchronize()
        held[recipe] = torch.cuda.memory_stats()["requested_bytes.all.current"] - before
        for layer in trainer.wrapper.modules():
            assert not getattr(layer, "_fp8_workspaces", None), type(layer)
        weights = sum(group.layout.item_numel for group in trainer.wrapper.engine.groups)
        del trainer
    more = held["delayed"] - held[None]
    assert more < weights // 4, f"{more} bytes more than bf16, of {weights} weights"
    return f"{more} bytes more than in bf16, {weights} weights"


CHECKS = {
    **{
        f"{strategy}, {recipe}": Check(trains_like_ddp, (strategy, recipe))
        for strategy in STRATEGIES
        for recipe in RECIPES
    },
    "computes in FP8": Check(computes_in_fp8),
    "twice": Check(same_run_twice),
    "memory": Check(keeps_no_fp8_model),
}
OUTCOMES = Outcomes(CHECKS, timeout_s=170.0)
os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"  # the ranks inherit it
HAS_TE = importlib.util.find_spec("transformer_engine") is not None


def _has_fp8() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)


@pytest.mark.skipif(not HAS_TE, reason="Transformer Engine is not installed")
@pytest.mark.skipif(not _has_fp8(), reason="this GPU has no FP8")
@pytest.mark.parametrize("name", CHECKS)
def test_fp8(name: str) -> None:
    OUTCOMES.expect(name)
