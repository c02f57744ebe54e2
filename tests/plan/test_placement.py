"""Modules that are sharded or left alone, in one model; and a change of `requires_grad`
after wrapping is an error (traps R5, MB-956: a tower with another scheme than the rest)."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.lib.gpt.checkpoints import loaded, saved
from tests.lib.gpt.gpt import batches, init_megatron, make_trainer, train_step
from tests.lib.gpt.models import ALONE, CASE, SIZES, TwoTowers, freeze_part, gpt, towers, varied
from tests.lib.gpt.topologies import model_config
from tests.lib.gpt.variants import (
    STRATEGIES,
    ZERO_1,
    ZERO_3,
    Variant,
    compare,
    differ_by_rank,
    marked,
    unchanged,
)
from tests.lib.ranks.shared_ranks import on_ranks

CHECKS = ("plan/placement.py", "build/guards.py")

LEFT: dict[str, str] = {"*": "leave", "text*": "shard", "projector": "shard"}
"""All but the frozen tower is sharded: later patterns win."""


_towers = partial(towers, recompute={}, tied=False, change=freeze_part)


def tower_is_left_alone(ours: Any, reference: Any, strategy: str) -> None:
    managed = {pair.managed.fqns[0] for pair in ours.wrapper.engine.pairs}
    assert managed
    assert not any(name.startswith("vision.") for name in managed)


def _left(world: int, strategies: tuple[str, ...], **more: Any) -> Variant:
    return Variant(
        f"{world} ranks, {strategies[0]}",
        strategies,
        world,
        random=True,
        case=SIZES,
        build=_towers,
        wrapper={"module_placements": LEFT},
        compare="free",
        reference={"change": unchanged},
        expect=tower_is_left_alone,
        **more,
    )


ROWS = [_left(2, (ZERO_3,))]
for world in (1, 2, 3):
    ROWS.append(_left(world, STRATEGIES, full=True))
for world in (1, 2, 3):
    ROWS.append(_left(world, (ZERO_1,), full=True, change=differ_by_rank))


@pytest.mark.parametrize("row", marked(ROWS))
@on_ranks()
def test_places_train_to_the_same_weights(row: Variant, rank: int, seed: int) -> None:
    compare(row, rank, seed)


@on_ranks(2)
def test_checkpoint_of_a_model_with_places(rank: int, root: Path) -> None:
    device = init_megatron()
    trainers = []
    for seed in (1, 2):
        made = _towers(CASE.but(seed=seed), device)
        trainers.append(make_trainer(made, CASE, ZERO_3, module_placements=LEFT))
    one, other = trainers
    train_step(one, batches(CASE, 0, rank, device))
    train_step(one, batches(CASE, 1, rank, device))
    saved(one, root)
    loaded(other, root)
    for step in (2, 3):
        data = batches(CASE, step, rank, device)
        assert train_step(one, data) == train_step(other, data), step


@pytest.mark.parametrize(
    ("placements", "said"),
    (
        ({"vision": "somewhere"}, "Use one of ['shard', 'leave']"),
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


LINEAR = "decoder.layers.0.mlp.linear_fc1.weight"


def _frozen(p):
    return p.requires_grad_(False)


def _trained(p):
    return p.requires_grad_(True)


AFTERWARDS = {
    "frozen": (unchanged, LINEAR, _frozen, "requires_grad of"),
    "trained": (
        freeze_part,
        "embedding.word_embeddings.weight",
        _trained,
        "requires_grad of",
    ),
}
"""What is done before wrapping; to which parameter, and what, behind it; what the error says."""


def _hooked(hook, p):
    return getattr(p, hook)(print)


for hook in ("register_hook", "register_post_accumulate_grad_hook"):
    AFTERWARDS[hook] = (unchanged, LINEAR, partial(_hooked, hook), "gradient hooks on")


@pytest.mark.parametrize("what", AFTERWARDS)
@on_ranks(1)
def test_what_is_changed_of_a_parameter_after_wrapping_is_one_error(rank: int, what: str) -> None:
    before, name, change, said = AFTERWARDS[what]
    device = init_megatron()
    model = varied(lambda: gpt(model_config(ALONE, CASE), False), 1, before)
    trainer = make_trainer(model, CASE, ZERO_3)
    train_step(trainer, batches(CASE, 0, rank, device))
    trainer.wrapper.stop_communication()
    change(dict(trainer.wrapper.module.module.named_parameters())[name])
    with pytest.raises(RuntimeError, match=f"{said} {name} .1 parameters"):
        train_step(trainer, batches(CASE, 1, rank, device))
