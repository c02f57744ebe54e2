"""`qk_clip`: core's clipping of query and key weights after a step, on sharded weights."""

from __future__ import annotations

from collections.abc import Callable
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
    STRATEGIES,
    Case,
    Trainer,
    batches,
    build_trainer,
    train_step,
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


def _expected(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Whole weights, clipped head by head as the method of Muon's authors says: queries by the
    factor to the power of alpha, keys by the rest of it, values not at all."""
    found = {name: weight.clone() for name, weight in weights.items()}
    size = CASE.hidden // CASE.heads
    for number, logits in TOO_LARGE.items():
        weight = found[f"decoder.layers.{number}.self_attention.linear_qkv.weight"]
        heads = weight.view(CASE.heads, 3, size, CASE.hidden)
        for head, logit in enumerate(logits):
            factor = min(1.0, THRESHOLD / logit)
            heads[head, 0] *= factor**ALPHA
            heads[head, 1] *= factor ** (1 - ALPHA)
    return found


def _check(case: Case, strategy: str, device: torch.device, clip: Callable[..., float]) -> None:
    """Three steps, after each of which some heads are clipped. A second model is given the clipped
    weights as a load: both have the same losses from then on."""
    trainer, other = (build_trainer(case, strategy, device, _turn_on) for _ in range(2))
    for step in range(3):
        data = batches(case, step, 0, device)
        assert train_step(trainer, data) == train_step(other, data)
        _set_logits(trainer.wrapper)
        before = trainer.params()
        assert clip([trainer.wrapper]) == max(TOO_LARGE[0])
        after = trainer.params()
        for name, weight in _expected(before).items():
            torch.testing.assert_close(after[name], weight, rtol=1e-6, atol=0.0, msg=name)
        clipped = {name for name in after if not torch.equal(after[name], before[name])}
        assert len(clipped) == len(TOO_LARGE)
        _write(other, trainer)
        cores = [attention.core_attention for attention in _layers(trainer.wrapper)]
        assert [core.current_max_attn_logits for core in cores] == [None] * CASE.num_layers


def _write(other: Trainer, trainer: Trainer) -> None:
    """Gives `other` the main weights of `trainer`, by the way that a load goes."""
    for chunk in (other.wrapper, trainer.wrapper):
        chunk.stop_communication()
    sources = dict(trainer.wrapper.named_parameters())
    with torch.no_grad():
        for name, param in other.wrapper.named_parameters():
            param._local_tensor.copy_(sources[name]._local_tensor)
    other.wrapper.module.install_optimized_model_weights()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("bf16", [False, True])
def test_rows_of_clipped_heads_are_scaled_and_the_next_forward_sees_it(
    one_rank: torch.device, strategy: str, bf16: bool
) -> None:
    _check(CASE.but(bf16=bf16, overlap=bf16), strategy, one_rank, clip_qk)


def test_core_finds_the_layers_where_a_training_loop_calls_it(one_rank: torch.device) -> None:
    """By the name in its own module, and wherever it was imported from there."""
    install()
    try:
        assert qk_clip.clip_qk is clip_qk
        _check(CASE.but(bf16=True), "optim_grads_params", one_rank, qk_clip.clip_qk)
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
