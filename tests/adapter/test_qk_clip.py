"""`qk_clip`: core's clipping of query and key weights after a step, on sharded weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.optimizer import qk_clip
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import nn

from megatron_fsdp_adapter import install, uninstall
from megatron_fsdp_adapter.megatron.qk_clip import clip_qk
from tests.distributed.gpt import (
    Case,
    build_trainer,
)

CASE = Case(num_layers=3, hidden=24, heads=3, ffn=20, vocab=23, microbatches=1)
THRESHOLD, ALPHA = 100.0, 0.3
TOO_LARGE = {0: [50.0, 130.0, 400.0], 2: [90.0, 99.0, 250.0]}
"""Largest logits of each head in layers that are clipped. No head of layer 1 is above it."""


def _turn_on(model: nn.Module) -> None:
    for config in (model.config, *(layer.config for layer in _layers(model))):
        config.qk_clip, config.qk_clip_threshold, config.qk_clip_alpha = True, THRESHOLD, ALPHA


def _layers(model: Any) -> list[Any]:
    kinds = (SelfAttention, MLASelfAttention)
    return [module for module in model.modules() if isinstance(module, kinds)]


def _set_logits(model: nn.Module) -> None:
    """Transformer Engine's attention notes them in a forward on GPUs."""
    for number, attention in enumerate(_layers(model)):
        logits = TOO_LARGE.get(number, [THRESHOLD] * CASE.heads)
        attention.core_attention.current_max_attn_logits = torch.tensor(logits)


def test_core_finds_the_layers_where_a_training_loop_calls_it() -> None:
    """By the name in its own module, and wherever it was imported from there."""
    install()
    try:
        assert qk_clip.clip_qk is clip_qk
    finally:
        uninstall()
    assert qk_clip.clip_qk is not clip_qk


def test_the_engine_is_told_once_for_each_layer_that_is_clipped(
    one_rank: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Quantized weights are made anew only then. What is told costs copies in host memory, and is
    a load where weights are frozen."""
    trainer = build_trainer(CASE, "optim_grads_params", one_rank, _turn_on)
    told: list[bool] = []
    monkeypatch.setattr(
        trainer.wrapper.engine, "main_weights_changed", lambda loaded: told.append(loaded)
    )
    _set_logits(trainer.wrapper)
    clip_qk([trainer.wrapper])
    assert told == [False] * len(TOO_LARGE)


def test_the_largest_logit_alone_changes_no_weight(one_rank: torch.device) -> None:
    """`log_max_attention_logit` without `qk_clip`."""
    trainer = build_trainer(CASE.but(bf16=True), "optim_grads_params", one_rank)
    _set_logits(trainer.wrapper)
    before = trainer.params()
    assert clip_qk([trainer.wrapper], log_max_only=True) == max(TOO_LARGE[0])
    after = trainer.params()
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_other_wrappers_are_left_to_core(one_rank: torch.device) -> None:
    """Beside one of ours. Core of 0.16.1 to 0.19.2 cannot clip shards of its own optimizer."""
    build_trainer(CASE, "optim", one_rank)
    stock = build_trainer(CASE.but(bf16=True), None, one_rank)
    _set_logits(stock.wrapper)
    assert clip_qk([stock.wrapper], log_max_only=True) == max(TOO_LARGE[0])
