"""Quantised weights in the combinations of the matrix, on CPUs: Megatron's wrapper over a GPT whose
linear weights are of the emulated library, against stock DDP over what they stand for."""

from __future__ import annotations

import pytest

from tests.distributed.launch import run_ranks
from tests.matrix import cells
from tests.matrix.table import broken_rules, cell_named, name_of
from tests.quantised.emulated_cells import check

RECIPES = ("current", "block128")


def quantised_cells(ranks: int) -> list[str]:
    """The cells of the CPU array, in bf16, and with weights that are there when they are wrapped:
    the emulated library knows no meta device."""
    found = [
        name_of({**cell, "precision": "bf16", "start": "usual"})
        for cell in cells.cached("cpu")
        if cell["ranks"] == ranks
    ]
    return [name for name in dict.fromkeys(found) if not broken_rules(cell_named(name))]


@pytest.mark.parametrize(
    "ranks", (2, pytest.param(3, marks=pytest.mark.full), pytest.param(4, marks=pytest.mark.full))
)
def test_quantised_weights_train_as_what_they_stand_for(ranks: int) -> None:
    names = quantised_cells(ranks)
    assert len(names) > 1
    for outcome in run_ranks(check, ranks, names, RECIPES, timeout=500.0):
        assert len(outcome) == len(names) * len(RECIPES)
        assert {cell: problems for cell, problems in outcome.items() if problems} == {}


def test_the_comparison_sees_weights_of_another_recipe() -> None:
    names = ["cpu precision=bf16", "cpu strategy=optim precision=bf16"]
    for outcome in run_ranks(check, 2, names, ["block128"], "current"):
        for cell, problems in outcome.items():
            seen = {problem.split(":")[0] for problem in problems}
            assert {"gradient", "loss", "movement"} <= seen, (cell, seen)
