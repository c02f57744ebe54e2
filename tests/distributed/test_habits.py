"""What users do beside the plain loop trains to the same weights as under stock DDP.

Guards against traps A8 (missing gradients), G4, R1 and R2 (resharding inside recomputation), R5
(frozen modules), R7 (evaluation between steps), S1 and S3 (tied weights counted twice).
"""

from __future__ import annotations

import importlib.util

import pytest

from tests.distributed.gpt import STRATEGIES
from tests.distributed.habits import HABITS, check_habit
from tests.distributed.launch import run_ranks
from tests.distributed.random_cases import fresh_seed, random_case

pytestmark = pytest.mark.once

HAS_TE = importlib.util.find_spec("transformer_engine") is not None
NAMES = [name for name, habit in HABITS.items() if HAS_TE or not habit.needs_te]


@pytest.mark.parametrize(
    ("world", "strategies"),
    [
        (2, None),
        pytest.param(2, STRATEGIES, marks=pytest.mark.full),
        pytest.param(1, STRATEGIES, marks=pytest.mark.full),
    ],
)
def test_trains_to_the_same_weights(world: int, strategies: tuple[str, ...] | None) -> None:
    """By default each habit with ZeRO-3 and one of the other strategies."""
    case = random_case(fresh_seed()).but(num_layers=2, tied=False, positions="rope", batch=1)
    run_ranks(check_habit, world, case, NAMES, strategies, timeout=400)
