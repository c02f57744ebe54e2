"""Gradients that reach a parameter after its unit seemed done, and gradients of inputs: plain
modules train to the weights of the unsharded module. Which tensors of outputs and of containers are
noticed: tests/engine/test_engine_hooks.py."""

from __future__ import annotations

import pytest

from tests.distributed.gpt import STRATEGIES
from tests.distributed.late_gradients import HABITS, check_habit
from tests.distributed.shared_ranks import on_ranks

BY_TURNS = [(name, 2, (STRATEGIES[at % 3], STRATEGIES[3])) for at, name in enumerate(HABITS)]
"""Each habit with ZeRO-3 and one of the other strategies."""
ALONE = [(name, 1, STRATEGIES) for name in HABITS]
"""A read of released memory is seen at once."""
EVERY = [pytest.param(name, 2, STRATEGIES, marks=pytest.mark.full) for name in HABITS]


@pytest.mark.parametrize(("name", "world", "strategies"), [*BY_TURNS, *ALONE, *EVERY])
@on_ranks()
def test_trains_to_the_same_weights(
    rank: int, world: int, name: str, strategies: tuple[str, ...]
) -> None:
    check_habit(name, rank, world, strategies)
