"""QK clipping on shards of uneven sizes, against core's own on whole weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from megatron_fsdp_adapter.megatron.qk_clip import clip_qk
from tests.distributed import models
from tests.distributed.gpt import (
    STRATEGIES,
    Case,
    batches,
    build_model,
    forward_backward,
    init_megatron,
    load_weights,
    make_trainer,
    train_step,
)
from tests.distributed.shared_ranks import on_ranks
from tests.distributed.topologies import Topology, build_chunk, init_topology, model_config

WORLD, STEPS, THRESHOLD = 2, 3, 100.0
CASE = Case(num_layers=2, hidden=18, heads=3, ffn=20, vocab=23, seq=8, batch=1, microbatches=2,
            bias=False)  # fmt: skip


def _built(kind: str, device: torch.device) -> nn.Module:
    torch.manual_seed(CASE.seed)
    plain = build_model(CASE, device) if kind == "dense" else models.latent_attention()
    for module in (plain, *_attentions(plain)):
        module.config.qk_clip, module.config.qk_clip_threshold = True, THRESHOLD
    return plain


def _attentions(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "clip_qk")]


def _set_logits(model: nn.Module, step: int, rank: int) -> None:
    """Each rank's own: core takes the largest of all."""
    for number, attention in enumerate(_attentions(model)):
        logits = torch.tensor([80.0, 60.0 + 70.0 * rank, 300.0 - 250.0 * rank]) + number + step
        attention.core_attention.current_max_attn_logits = logits


def _clipped(kind: str, device: torch.device, weights: dict[str, Any], step: int) -> Any:
    """Whole weights, clipped by core."""
    whole = _built(kind, device)
    whole.load_state_dict(weights, strict=False)
    for rank in range(WORLD):  # both ranks' logits are above or below for heads of their own
        _set_logits(whole, step, rank)
        for attention in _attentions(whole):
            noted = attention.core_attention.current_max_attn_logits
            before = getattr(attention, "largest", noted)
            attention.largest = torch.maximum(before, noted)
    for attention in _attentions(whole):
        attention.core_attention.current_max_attn_logits = attention.largest
        attention.clip_qk()
    return {name: param.detach() for name, param in whole.named_parameters()}


@pytest.mark.parametrize("kind", ["dense", "latent"])
@on_ranks(WORLD)
def test_every_rank_scales_the_rows_that_it_has(rank: int, kind: str) -> None:
    device = init_megatron()
    for strategy in STRATEGIES:
        trainer = make_trainer(_built(kind, device), CASE, strategy)
        for step in range(STEPS):
            train_step(trainer, batches(CASE, step, rank, device))
            before = trainer.params()
            expected = _clipped(kind, device, before, step)
            _set_logits(trainer.wrapper, step, rank)
            assert clip_qk([trainer.wrapper]) == 300.0 + step + CASE.num_layers - 1
            cores = [attention.core_attention for attention in _attentions(trainer.wrapper)]
            assert not any(core.current_max_attn_logits is not None for core in cores)
            after = trainer.params()
            loaded = make_trainer(_built(kind, device), CASE, strategy)
            load_weights(loaded, after)
            data = batches(CASE, 9, rank, device)
            seen = [forward_backward(one, data, forward_only=True) for one in (trainer, loaded)]
            assert seen[0] == seen[1], "the next forward has the clipped weights"
            for name, weight in expected.items():
                torch.testing.assert_close(after[name], weight, rtol=1e-6, atol=0.0, msg=name)
            changed = [name for name in after if not torch.equal(after[name], before[name])]
            assert len(changed) == CASE.num_layers * (1 if kind == "dense" else 2), changed


@on_ranks(2)
def test_tensor_parallel_ranks_say_the_same_of_what_was_clipped(rank: int) -> None:
    """Heads of the first layer are clipped on the second rank, and of no layer on the first."""
    topology = Topology("tp2", tp=2)
    init_topology(topology)
    case = CASE.but(hidden=16, heads=4, vocab=24)
    model = build_chunk(topology, case, model_config(topology, case), 0)
    for module in (model, *_attentions(model)):
        module.config.qk_clip, module.config.qk_clip_threshold = True, THRESHOLD
    trainer = make_trainer(model, case, "optim_grads_params")
    engine, told = trainer.wrapper.engine, []
    engine.main_weights_changed = lambda loaded: told.append(loaded)
    weight = "decoder.layers.0.self_attention.linear_qkv.weight"
    before = trainer.wrapper.module.module.get_parameter(weight)._local_tensor.clone()
    for number, attention in enumerate(_attentions(trainer.wrapper)):
        # Core of 0.16.1 to 0.19.2 cuts a rank's rows by the sizes of all ranks.
        attention.query_projection_size //= 2
        attention.kv_projection_size //= 2
        logits = torch.tensor([50.0, 200.0 if rank == 1 and number == 0 else 60.0])
        attention.core_attention.current_max_attn_logits = logits
    clip_qk([trainer.wrapper])
    after = trainer.wrapper.module.module.get_parameter(weight)._local_tensor
    assert torch.equal(after, before) == (rank == 0)
    assert told == [False], "ranks of other heads have to gather the same anew"

