"""Whatever the order in which a model calls its parts, it trains to the weights of stock DDP (traps
R2, R6, R7, E9)."""

from __future__ import annotations

import pytest

from tests.distributed.call_habits import CALL_HABITS, check_call_habits
from tests.distributed.gpt import STRATEGIES
from tests.distributed.launch import run_ranks
from tests.distributed.random_cases import fresh_seed, random_case


@pytest.mark.parametrize(
    ("world", "strategies"),
    [
        (2, ("optim_grads_params",)),
        pytest.param(2, STRATEGIES[:3], marks=pytest.mark.full),
        pytest.param(1, STRATEGIES, marks=pytest.mark.full),
    ],
)
def test_trains_to_the_same_weights(world: int, strategies: tuple[str, ...]) -> None:
    case = random_case(fresh_seed()).but(num_layers=2, tied=False, positions="rope", batch=1)
    names = list(CALL_HABITS)
    found = run_ranks(check_call_habits, world, case, names, strategies, timeout=240)
    assert found == [len(names)] * world
