"""Kinds of models with quantized weights, on two GPUs: Megatron's wrapper against stock DDP with
`fp8_param_gather`, bytes, scales and main weights bit for bit.

    python -m pytest -q -rA tests/gpu/test_gpu_fp8_models.py
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from tests.distributed.gpt import (
    Case,
    Trainer,
    batches,
    forward_backward,
    init_megatron,
    train_step,
)
from tests.gpu.gpu_ranks import Check, Outcomes
from tests.gpu.test_gpu_fp8_params import CASE, quantized_of, trainer_of
from tests.quantized.te_checks import same

STEPS = 4


def _nothing(model: torch.nn.Module) -> None:
    pass


def freezes_matrices(model: torch.nn.Module) -> None:
    """Norms, embedding and output layer are trained over a frozen base."""
    for name, param in model.named_parameters():
        if "decoder" in name and param.ndim == 2:
            param.requires_grad_(False)


@dataclass(frozen=True)
class Kind:
    """count: quantized weights; case: changes of the case; options: of the model config; ddp: of
    the DDP config."""

    count: int
    case: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    ddp: dict[str, Any] = field(default_factory=dict)
    change: Callable[[torch.nn.Module], None] = _nothing
    recipes: tuple[str, ...] = ("tensorwise", "blockwise")
    strategies: tuple[str, ...] = ("optim_grads_params",)


KINDS = {
    "full recompute": Kind(
        8, {"recompute": "full-1"}, recipes=("delayed", "tensorwise", "blockwise")
    ),
    "recomputed mlp": Kind(8, {"recompute": "selective-mlp"}),
    "tied": Kind(8, {"tied": True}),
    "first and last layer in bf16": Kind(
        8, {"num_layers": 4},
        {"first_last_layers_bf16": True, "num_layers_at_start_in_bf16": 1,
         "num_layers_at_end_in_bf16": 1},
    ),
    "frozen matrices": Kind(8, change=freezes_matrices),
    "transposes kept": Kind(
        8, {"microbatches": 3}, ddp={"keep_fp8_transpose_cache": True},
        strategies=("no_shard", "optim"),
    ),
    "grouped experts": Kind(
        # Of each layer qkv, projection, and two matrices of each of four experts.
        2 * (2 + 2 * 4),
        options={
            "num_moe_experts": 4, "moe_grouped_gemm": True, "moe_ffn_hidden_size": 256,
            "moe_router_topk": 2, "moe_router_load_balancing_type": "none",
            "moe_token_dispatcher_type": "alltoall", "moe_router_padding_for_quantization": True,
        },
        strategies=("optim", "optim_grads_params"),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Noted:
    """Of one wrapper after a step, copied: bytes and scales of quantized weights, main weights, the
    step's loss, and that of an evaluation behind it."""

    quantized: Mapping[str, tuple[torch.Tensor, torch.Tensor]]
    mains: Mapping[str, torch.Tensor]
    losses: tuple[Any, ...] = ()


def _noted(trainer: Trainer, losses: tuple[Any, ...] = ()) -> Noted:
    mains = {name: value.clone() for name, value in trainer.params().items()}
    return Noted(quantized_of(trainer), mains, losses)


def trained(
    case: Case, recipe: str, strategy: str | None, device: torch.device, kind: Kind, rank: int
) -> list[Noted]:
    """What was noted before the first step, and after each. TE keeps the largest values of all
    modules of a process in one state, which every forward of any of them moves on: one wrapper
    trains after the other, from a new state each."""
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    FP8GlobalStateManager.reset()
    trainer = trainer_of(case, recipe, strategy, device, kind.options, kind.change, more=kind.ddp)
    notes = [_noted(trainer)]
    for step in range(STEPS):
        data = batches(case, step, rank, device)
        loss = train_step(trainer, data)[0]
        after = _noted(trainer)
        with torch.no_grad():
            seen = forward_backward(trainer, data, forward_only=True)
        notes.append(replace(after, losses=(loss, seen)))
    return notes


def trains_as_ddp(rank: int, world: int, name: str, recipe: str, strategy: str) -> str:
    """With an evaluation behind each step, which computes with the step's weights."""
    device, kind = init_megatron(), KINDS[name]
    case = CASE.but(**kind.case)
    theirs, ours = (
        trained(case, recipe, one, device, kind, rank) for one in (None, strategy)
    )
    for step, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        label = f"{name}, {recipe}, {strategy}, after {step} steps"
        assert mine.losses == other.losses, (label, mine.losses, other.losses)
        assert mine.quantized.keys() == other.quantized.keys(), label
        assert len(mine.quantized) == kind.count, label
        for key, (data, scales) in mine.quantized.items():
            same(data, other.quantized[key][0], f"{label}, bytes of {key}")
            same(scales, other.quantized[key][1], f"{label}, scales of {key}")
        assert mine.mains.keys() == other.mains.keys(), label
        for key, main in mine.mains.items():
            # DDP has none of frozen weights, but what their bytes stand for.
            if key not in mine.quantized or kind.change is not freezes_matrices:
                same(main, other.mains[key], f"{label}, main weights of {key}")
    return f"{kind.count} weights, losses {[note.losses for note in ours[1:]]}"


CHECKS = {
    f"{name}, {recipe}, {strategy}": Check(trains_as_ddp, (name, recipe, strategy))
    for name, kind in KINDS.items()
    for recipe in kind.recipes
    for strategy in kind.strategies
}
OUTCOMES = Outcomes(CHECKS, timeout_s=400.0)
os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"  # the ranks inherit it
HAS_TE = importlib.util.find_spec("transformer_engine") is not None


@pytest.mark.skipif(not HAS_TE, reason="Transformer Engine is not installed")
@pytest.mark.parametrize("name", CHECKS)
def test_kinds_of_models_train_as_under_ddp(name: str) -> None:
    OUTCOMES.expect(name)
