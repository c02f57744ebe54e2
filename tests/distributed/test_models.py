"""Models of every kind, with every kind of recompute, strategy and choice of what is trained, train
to the same weights as under stock DDP (traps R1, R2, R3, R5, R6, S1, S3, M7, E3, I4).

A few cells by default, all that pairwise coverage needs with `--full`; docs/models.md lists what
they cover and what they do not.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.launch import run_ranks
from tests.distributed.models import AXES, CELLS, check_cells, uncovered_pairs
from tests.distributed.random_cases import fresh_seed

DOCUMENT = Path(__file__).parents[2] / "docs" / "models.md"
FEW = [cell for cell in CELLS if cell.strategy == "optim_grads_params"][:6]
"""With the strategy that gathers and reshards; every model is among them."""


def test_few_cells_train_to_the_same_weights() -> None:
    assert {cell.model for cell in FEW} == set(AXES[0])
    assert run_ranks(check_cells, 2, FEW, fresh_seed(), 2) == [len(FEW)] * 2


@pytest.mark.full
@pytest.mark.parametrize("world", (1, 2, 3))
def test_all_cells_train_to_the_same_weights(world: int) -> None:
    found = run_ranks(check_cells, world, CELLS, fresh_seed(), timeout=600)
    assert found == [len(CELLS)] * world


def test_document_lists_the_values_and_every_pair_that_is_not_covered() -> None:
    text = DOCUMENT.read_text()
    for value in (value for axis in AXES for value in axis):
        assert f"| {value} |" in text or f"`{value}`" in text, value
    listed = [line for line in text.splitlines() if line.startswith("- ") and " x " in line]
    expected = {f"- {pair}: {reason}" for pair, reason in uncovered_pairs().items()}
    assert set(listed) == expected
    assert f"{len(CELLS)} cells" in text
