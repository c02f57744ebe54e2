"""Modules that are sharded or left alone, in one model; and a change of `requires_grad`
after wrapping is an error (traps R5, MB-956: a tower with another scheme than the rest)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.distributed.checkpoints import loaded, saved
from tests.distributed.gpt import Case, batches, init_megatron, make_trainer, train_step
from tests.distributed.models import ALONE, CASE, TwoTowers, freeze_part, gpt, varied
from tests.distributed.shared_ranks import on_ranks
from tests.distributed.test_models import SIZES
from tests.distributed.topologies import model_config
from tests.distributed.variants import (
    STRATEGIES,
    ZERO_1,
    ZERO_3,
    Variant,
    compare,
    differ_by_rank,
    marked,
    unchanged,
)

LEFT: dict[str, str] = {"*": "leave", "text*": "shard", "projector": "shard"}
"""All but the frozen tower is sharded: later patterns win."""


def _towers(case: Case, device: torch.device) -> nn.Module:
    return varied(lambda: TwoTowers({}, False), case.seed, freeze_part)


def tower_is_left_alone(ours: Any, reference: Any, strategy: str) -> None:
    managed = {pair.managed.fqns[0] for pair in ours.wrapper.engine.pairs}
    assert managed and not any(name.startswith("vision.") for name in managed)


def _left(world: int, strategies: tuple[str, ...], **more: Any) -> Variant:
    return Variant(
        f"{world} ranks, {strategies[0]}", strategies, world, random=True, case=SIZES,
        build=_towers, wrapper={"module_placements": LEFT}, compare="free",
        reference={"change": unchanged}, expect=tower_is_left_alone, **more,
    )  # fmt: skip


ROWS = (
    _left(2, (ZERO_3,)),
    *(_left(world, STRATEGIES, full=True) for world in (1, 2, 3)),
    *(_left(world, (ZERO_1,), full=True, change=differ_by_rank) for world in (1, 2, 3)),
)


@pytest.mark.parametrize("row", marked(ROWS))
@on_ranks()
def test_places_train_to_the_same_weights(row: Variant, rank: int, seed: int) -> None:
    compare(row, rank, seed)


@on_ranks(2)
def test_checkpoint_of_a_model_with_places(rank: int, root: Path) -> None:
    device = init_megatron()
    case = CASE.but(seed=5)
    models = (_towers(CASE.but(seed=seed), device) for seed in (1, 2))
    one, other = (make_trainer(made, case, ZERO_3, module_placements=LEFT) for made in models)
    train_step(one, batches(case, 0, rank, device))
    train_step(one, batches(case, 1, rank, device))
    saved(one, root)
    loaded(other, root)
    for step in (2, 3):
        results = [train_step(t, batches(case, step, rank, device)) for t in (one, other)]
        assert results[0] == results[1], step
    vision = [dict(t.wrapper.named_buffers()) for t in (one, other)]
    assert vision[0].keys() == vision[1].keys()


@pytest.mark.parametrize(
    ("placements", "said"),
    (
        ({"vision": "somewhere"}, "Use one of ['shard', 'leave']"),
        ({"projector": "replicate"}, "Leave the pattern out: a small module is sharded"),
        ({"visoin": "leave"}, "no module with parameters has such a name"),
        ({"text": "leave"}, "is ignored but trainable"),
        ({"text.output_layer": "leave"}, "are one parameter, but placed as"),
    ),
)
@on_ranks(1)
def test_wrong_places_are_one_early_error(placements: dict[str, str], said: str) -> None:
    init_megatron()
    model: Any = varied(lambda: TwoTowers({}, True), 1, freeze_part)
    if "text.output_layer" in placements:
        model.text.output_layer.weight = model.text.embedding.word_embeddings.weight
    with pytest.raises(ValueError) as caught:
        make_trainer(model, CASE, ZERO_1, module_placements=placements)
    assert said in str(caught.value), caught.value


@pytest.mark.parametrize(
    ("value", "name"),
    ((False, "decoder.layers.0.mlp.linear_fc1.weight"), (True, "embedding.word_embeddings.weight")),
)
@on_ranks(1)
def test_a_change_of_requires_grad_after_wrapping_is_one_error(
    rank: int, value: bool, name: str
) -> None:
    device = init_megatron()
    change = freeze_part if value else unchanged
    model = varied(lambda: gpt(model_config(ALONE, CASE), False), 1, change)
    trainer = make_trainer(model, CASE, ZERO_3)
    train_step(trainer, batches(CASE, 0, rank, device))
    trainer.wrapper.stop_communication()
    param = dict(trainer.wrapper.module.module.named_parameters())[name]
    param.requires_grad_(value)
    with pytest.raises(RuntimeError, match=f"requires_grad of {name} .1 parameters"):
        train_step(trainer, batches(CASE, 1, rank, device))


@pytest.mark.parametrize("hook", ("register_hook", "register_post_accumulate_grad_hook"))
@on_ranks(1)
def test_a_gradient_hook_that_is_registered_after_wrapping_is_an_error(
    rank: int, hook: str
) -> None:
    device = init_megatron()
    trainer = make_trainer(varied(lambda: gpt(model_config(ALONE, CASE), False), 1), CASE, ZERO_3)
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    param = dict(trainer.wrapper.module.module.named_parameters())[name]
    getattr(param, hook)(lambda given: None)
    with pytest.raises(RuntimeError, match=f"gradient hooks on {name} .1 parameters"):
        train_step(trainer, batches(CASE, 0, rank, device))
