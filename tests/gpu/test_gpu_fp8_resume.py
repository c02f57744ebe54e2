"""Runs in FP8 on two GPUs that are saved and resumed, with Transformer Engine's own layers: losses
and bits are those of a run that was not stopped.

    python -m pytest -q -rA tests/gpu/test_gpu_fp8_resume.py
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_fsdp_adapter.checkpoint import (
    load_checkpoint,
    load_training_state,
    save_checkpoint,
    training_state,
)
from megatron_fsdp_adapter.checkpoint.names import FP8_SCALING
from tests.distributed.gpt import Trainer, batches, init_megatron, train_step
from tests.gpu.gpu_ranks import Check, Outcomes
from tests.gpu.test_gpu_fp8_params import CASE, RECIPES, quantized_of, trainer_of
from tests.quantized.te_checks import same

SAVED = "optim_grads_params"


def bits_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Main weights, bytes and scales of quantized ones, and what delayed scaling knows."""
    found = trainer.params()
    for name, (data, scales) in quantized_of(trainer).items():
        found |= {f"{name}, bytes": data, f"{name}, scales": scales}
    state = trainer.wrapper.state_dict_for_save_checkpoint()
    return found | {key: value for key, value in state.items() if key.endswith(FP8_SCALING)}


def compare(mine: dict[str, torch.Tensor], other: dict[str, torch.Tensor], label: str) -> None:
    assert mine.keys() == other.keys(), (label, mine.keys() ^ other.keys())
    for name, value in other.items():
        same(mine[name], value, f"{label}, {name}")


def resumes(rank: int, world: int, recipe: str, quantized: bool) -> str:
    device = init_megatron()
    folder: list[Any] = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)

    def made(strategy: str, seed: int) -> Trainer:
        return trainer_of(CASE.but(seed=seed), recipe, strategy, device, quantized=quantized)

    def steps(trainer: Trainer, first: int) -> list[Any]:
        return [
            train_step(trainer, batches(CASE, step, rank, device)) for step in (first, first + 1)
        ]

    first = made(SAVED, CASE.seed)
    steps(first, 0)
    save_checkpoint(folder[0], 2, training_state([first.wrapper], first.optimizer))
    saved = bits_of(first)
    records = [name for name in saved if name.endswith(FP8_SCALING)]
    assert len(records) == (4 * CASE.num_layers if recipe == "delayed" else 0), records
    losses = steps(first, 2)
    end = bits_of(first)
    for strategy in (SAVED, "optim"):
        second, label = made(strategy, 77), f"{recipe}, {strategy}"
        state = training_state([second.wrapper], second.optimizer, is_loading=True)
        _, state = load_checkpoint(folder[0], state)
        load_training_state([second.wrapper], state, second.optimizer)
        compare(bits_of(second), saved, f"{label}, loaded")
        found = steps(second, 2)
        if strategy == SAVED:
            assert found == losses, (label, found, losses)
            compare(bits_of(second), end, f"{label}, two steps on")
    return f"{len(records)} records, losses {losses}"


CHECKS = {f"{recipe}, quantized weights": Check(resumes, (recipe, True)) for recipe in RECIPES}
CHECKS |= {f"{recipe}, bf16 weights": Check(resumes, (recipe, False))
           for recipe in ("delayed", "tensorwise")}  # fmt: skip
OUTCOMES = Outcomes(CHECKS, timeout_s=400.0)
os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"  # the ranks inherit it
HAS_TE = importlib.util.find_spec("transformer_engine") is not None


@pytest.mark.skipif(not HAS_TE, reason="Transformer Engine is not installed")
@pytest.mark.parametrize("name", CHECKS)
def test_a_resume_in_fp8_goes_on_as_if_never_stopped(name: str) -> None:
    OUTCOMES.expect(name)
