"""Modules that are sharded or left alone, in one model; and a change of `requires_grad`
after wrapping is an error (traps R5, MB-956: a tower with another scheme than the rest)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed.checks import check_loss, check_norm, check_weights
from tests.distributed.gpt import (
    STRATEGIES,
    batches,
    full_all,
    init_megatron,
    make_trainer,
    plain_name,
    train_step,
)
from tests.distributed.launch import run_ranks
from tests.distributed.mishaps import load, save
from tests.distributed.models import CASE, Cell, _build

TOWERS = Cell("two towers", "none", "", "frozen part")
LEFT: dict[str, str] = {"*": "leave", "text*": "shard", "projector": "shard"}
"""All but the frozen tower is sharded: later patterns win."""


def _trains(rank: int, world: int, seed: int, strategies: tuple[str, ...]) -> None:
    device = init_megatron()
    case = CASE.but(seed=seed)
    reference = make_trainer(_build(TOWERS, "none", seed), case.but(overlap=False), None)
    data = [batches(case, step, rank, device) for step in range(3)]
    expected = [train_step(reference, one) for one in data]
    weights = reference.params()
    for strategy in strategies:
        model = _build(TOWERS, "none", seed)
        if strategy == "optim":  # ranks begin differently: the first one's weights count
            for param in model.parameters():
                param.data.add_(rank)
        ours = make_trainer(model, case, strategy, module_placements=LEFT)
        label = f"{strategy}, {world} ranks, seed {seed}"
        for one, theirs in zip(data, expected, strict=True):
            mine = train_step(ours, one)
            check_loss(mine[0], theirs[0], label)
            check_norm(mine[1], theirs[1], label, 1e-5)
        managed = {pair.managed.fqns[0] for pair in ours.wrapper.engine.pairs}
        assert not any(name.startswith("vision.") for name in managed)
        held = {k: v for k, v in weights.items() if not k.startswith("vision.")}
        check_weights(_managed(ours), held, label)


def _managed(trainer: Any) -> dict[str, torch.Tensor]:
    trainer.wrapper.stop_communication()
    params = {plain_name(n): p for n, p in trainer.wrapper.named_parameters()}
    return full_all({n: p for n, p in params.items() if hasattr(p, "_local_tensor")})


@pytest.mark.parametrize(
    ("world", "strategies"),
    [
        (2, ("optim_grads_params",)),
        *(pytest.param(world, STRATEGIES, marks=pytest.mark.full) for world in (1, 2, 3)),
    ],
)
def test_places_train_to_the_same_weights(world: int, strategies: tuple[str, ...]) -> None:
    run_ranks(_trains, world, 11, strategies)


def _saves(rank: int, world: int, root: str) -> None:
    device = init_megatron()
    case = CASE.but(seed=5)

    def trainer(seed: int) -> Any:
        model = _build(TOWERS, "none", seed)
        return make_trainer(model, case, "optim_grads_params", module_placements=LEFT)

    one, other = trainer(1), trainer(2)
    train_step(one, batches(case, 0, rank, device))
    train_step(one, batches(case, 1, rank, device))
    save(one, root)
    load(other, root)
    for step in (2, 3):
        results = [train_step(t, batches(case, step, rank, device)) for t in (one, other)]
        assert results[0] == results[1], step
    vision = [dict(t.wrapper.named_buffers()) for t in (one, other)]
    assert vision[0].keys() == vision[1].keys()


def test_checkpoint_of_a_model_with_places(tmp_path: Any) -> None:
    run_ranks(_saves, 2, str(tmp_path))


def _refused(rank: int, world: int) -> None:
    init_megatron()
    for placements, said in (
        ({"vision": "somewhere"}, "use one of ['shard', 'leave']"),
        ({"projector": "replicate"}, "Leave the pattern out: a small module is sharded"),
        ({"visoin": "leave"}, "no module with parameters has such a name"),
        ({"text": "leave"}, "is to be left alone, but requires a gradient"),
        ({"text.output_layer": "leave"}, "are one parameter, but placed as"),
    ):
        cell = Cell("two towers", "none", "", "tied, frozen part")
        model = _build(cell, "none", 1)
        if "text.output_layer" in placements:
            model.text.output_layer.weight = model.text.embedding.word_embeddings.weight
        with pytest.raises(ValueError) as caught:
            make_trainer(model, CASE, "optim", module_placements=placements)
        assert said in str(caught.value), caught.value


def test_wrong_places_are_one_early_error() -> None:
    run_ranks(_refused, 1)


def _changes(rank: int, world: int) -> None:
    device = init_megatron()
    for value, name in ((False, "decoder.layers.0.mlp.linear_fc1.weight"),
                        (True, "embedding.word_embeddings.weight")):
        cell = Cell("dense", "none", "", "frozen part" if value else "all")
        trainer = make_trainer(_build(cell, "none", 1), CASE, "optim_grads_params")
        train_step(trainer, batches(CASE, 0, rank, device))
        trainer.wrapper.stop_communication()
        params = dict(trainer.wrapper.module.module.named_parameters())
        params[name].requires_grad_(value)
        with pytest.raises(RuntimeError, match=f"requires_grad of {name} .1 parameters"):
            train_step(trainer, batches(CASE, 1, rank, device))
        params[name].requires_grad_(not value)


def test_a_change_of_requires_grad_after_wrapping_is_one_error() -> None:
    run_ranks(_changes, 1)
