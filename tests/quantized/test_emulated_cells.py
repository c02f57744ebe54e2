"""Quantized weights in the combinations of the matrix, on CPUs: Megatron's wrapper over a GPT whose
linear weights are of the emulated library, or in Transformer Engine's own classes, beside stock DDP
over plain weights that are given, after each step, the values that quantized ones stand for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from megatron_fsdp_adapter.core.engine.wgrad import WgradProtocol
from tests.lib.matrix import cells, training
from tests.lib.matrix.table import broken_rules, cell_named, name_of
from tests.lib.quantized.emulated import TE_RECIPES, whole_weight
from tests.lib.quantized.te_extension import FOLDERS, WITHOUT, run_te
from tests.lib.quantized.te_scaling import linears, quantize_layers
from tests.lib.ranks.launch import run_ranks

CHECKS = ("quantized/weights.py", "quantized/params.py")


@torch.no_grad()
def stand_for_quantized(trainer: Any, recipe: str, values: dict[str, torch.Tensor]) -> None:
    """Gives plain weights of `trainer`, stock DDP, what quantized ones of the same main weights
    stand for. `values`: of frozen weights, which have no main weights."""
    for number, chunk in enumerate(trainer.chunks):
        for name, module in linears(chunk):
            param: Any = module._parameters["weight"]
            key = f"{number}.{training.plain_name(name)}.weight"
            main = getattr(param, "main_param", None)
            if main is None:
                value = values.setdefault(key, param.detach().clone())
            else:
                value = main
            param.data.copy_(whole_weight(value, recipe, param.dtype).dequantize())


@contextlib.contextmanager
def emulated(recipe: str) -> Iterator[None]:
    """Inside, `training.check_cell` trains such weights, beside what they stand for."""
    make = training.chunk_of
    build = training.build
    step = training._updated
    mains = training._main_weights
    frozen: dict[str, torch.Tensor] = {}
    is_ours = [False]

    def chunk_of(*args: Any) -> nn.Module:
        model = make(*args)
        if is_ours[0]:
            quantize_layers(model, recipe)
        return model

    def built(cell: Any, *args: Any) -> Any:
        is_ours[0] = cell["strategy"] is not None
        trainer = build(cell, *args)
        if not is_ours[0]:
            stand_for_quantized(trainer, recipe, frozen)
            return trainer
        groups = [group for chunk in trainer.chunks for group in chunk.engine.groups]
        assert any(group.key.quantized for group in groups), "nothing is quantized"
        pairs = [pair for chunk in trainer.chunks for pair in chunk.engine.pairs]
        writers = {pair.managed.writer for pair in pairs if pair.group.key.quantized}
        fuses = WgradProtocol.ACCUMULATES in writers
        assert recipe not in TE_RECIPES or fuses is (cell["fusion"] == "on"), writers
        return trainer

    def updated(trainer: Any) -> float:
        norm = step(trainer)
        if trainer.strategy is None:
            stand_for_quantized(trainer, recipe, frozen)
        return norm

    def main_weights(*args: Any) -> Any:
        return {**mains(*args), **{name: value.float() for name, value in frozen.items()}}

    with contextlib.ExitStack() as stack:
        for name, function in (
            ("chunk_of", chunk_of),
            ("build", built),
            ("_updated", updated),
            ("_main_weights", main_weights),
        ):
            stack.enter_context(mock.patch.object(training, name, function))
        yield


Problems = dict[tuple[str, str], list[str]]


def check(rank: int, world: int, cells: Sequence[str], recipes: Sequence[str]) -> Problems:
    """(cell, recipe) -> the measures that do not hold."""
    found: Problems = {}
    for name in cells:
        for recipe in recipes:
            with emulated(recipe):
                measures = training.check_cell(cell_named(name), "tiny")
            found[name, recipe] = [
                f"{measure}: {one.error} of {one.bound} at {one.where}"
                for measure, one in measures.items()
                if not one.holds
            ]
    return found


RECIPES = ("current", "block128")


def quantized_cells(ranks: int) -> list[str]:
    """The cells of the CPU array, in bf16, with weights that are there when they are wrapped, as
    the emulated library knows no meta device."""
    found = [
        name_of({**cell, "precision": "bf16", "start": "usual"})
        for cell in cells.cached("cpu")
        if cell["ranks"] == ranks
    ]
    return [name for name in dict.fromkeys(found) if not broken_rules(cell_named(name))]


def check_all(ranks: int, names: list[str], recipes: tuple[str, ...]) -> None:
    assert names
    for outcome in run_ranks(check, ranks, names, recipes, timeout=500.0):
        assert len(outcome) == len(names) * len(recipes)
        assert {cell: problems for cell, problems in outcome.items() if problems} == {}


def test_quantized_weights_train_as_what_they_stand_for() -> None:
    """Each cell with one of the recipes, in turn."""
    names = quantized_cells(2)
    for position, recipe in enumerate(RECIPES):
        check_all(2, names[position :: len(RECIPES)], (recipe,))


@pytest.mark.full
@pytest.mark.parametrize("ranks", (2, 3, 4))
def test_quantized_weights_of_every_cell_and_recipe(ranks: int) -> None:
    check_all(ranks, quantized_cells(ranks), RECIPES)


OF_TE = {
    2: {
        "te block128": ("trained=tied", "strategy=optim recompute=full", "recompute=mlp",
                         "trained=adapter"),
        "te current": ("layers=moe ep=2", "fusion=on", "strategy=no_shard fusion=on"),
    },
    4: {"te current": ("strategy=no_shard tp=2 sp=on ranks=4", "tp=2 sp=on ranks=4")},
}  # fmt: skip
"""By ranks and recipe."""


@pytest.mark.skipif(not FOLDERS, reason=WITHOUT)
@pytest.mark.parametrize("ranks", OF_TE)
def test_weights_of_te_train_as_what_they_stand_for(ranks: int) -> None:
    for recipe, named in OF_TE[ranks].items():
        names = [name_of(cell_named(f"cpu precision=bf16 {name}")) for name in named]
        assert not [name for name in names if broken_rules(cell_named(name))]
        for outcome in run_te(FOLDERS[0], check, ranks, names, [recipe], timeout=500):
            assert len(outcome) == len(names), outcome
            assert not any(outcome.values()), outcome
