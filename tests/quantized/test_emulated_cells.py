"""Quantized weights in the combinations of the matrix, on CPUs: Megatron's wrapper over a GPT whose
linear weights are of the emulated library, against stock DDP over what they stand for."""

from __future__ import annotations

import pytest

from tests.distributed.launch import run_ranks
from tests.matrix import cells
from tests.matrix.table import broken_rules, cell_named, name_of
from tests.quantized.emulated_cells import check

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


def test_the_comparison_sees_weights_of_another_recipe() -> None:
    names = ["cpu precision=bf16", "cpu strategy=optim precision=bf16"]
    for outcome in run_ranks(check, 2, names, ["block128"], "current"):
        for cell, problems in outcome.items():
            seen = {problem.split(":")[0] for problem in problems}
            assert {"gradient", "loss", "movement"} <= seen, (cell, seen)
