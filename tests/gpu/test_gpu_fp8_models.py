"""Kinds of models with quantised weights, on two GPUs: Megatron's wrapper against stock DDP with
`fp8_param_gather`, bytes, scales and main weights bit for bit.

    python -m pytest -q -rA tests/gpu/test_gpu_fp8_models.py
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from tests.distributed.gpt import batches, forward_backward, init_megatron, train_step
from tests.gpu.gpu_ranks import Check, Outcomes
from tests.gpu.test_gpu_fp8_params import CASE, compare, trainer_of

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
    """count: quantised weights; case: changes of the case; options: of the model config."""

    count: int
    case: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
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


def trains_as_ddp(rank: int, world: int, name: str, recipe: str, strategy: str) -> str:
    """With an evaluation behind each step, which computes with the step's weights."""
    device, kind = init_megatron(), KINDS[name]
    case, label = CASE.but(**kind.case), f"{name}, {recipe}, {strategy}"
    theirs, ours = (
        trainer_of(case, recipe, one, device, kind.options, kind.change)
        for one in (None, strategy)
    )
    checked = compare(ours, theirs, f"{label}, made", kind.count)
    losses = []
    for step in range(STEPS):
        data = batches(case, step, rank, device)
        mine, other = train_step(ours, data)[0], train_step(theirs, data)[0]
        assert mine == other, (label, step, mine, other)
        compare(ours, theirs, f"{label}, step {step}", kind.count)
        with torch.no_grad():
            seen = [forward_backward(one, data, forward_only=True) for one in (ours, theirs)]
        assert seen[0] == seen[1], (label, step, seen)
        losses.append(mine)
    return f"{checked} weights, losses {losses}"


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
