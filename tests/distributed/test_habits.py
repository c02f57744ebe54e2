"""What users do beside the plain loop trains to the same weights as under stock DDP.

Guards against traps A8 (missing gradients), G4, R1 and R2 (resharding inside recomputation), R5
(frozen modules), R7 (evaluation between steps), S1 and S3 (tied weights counted twice).
"""

from __future__ import annotations

import pytest

from tests.distributed.habits import HABITS, check_habit
from tests.distributed.launch import run_ranks
from tests.distributed.random_cases import fresh_seed, random_case


@pytest.mark.parametrize("name", HABITS)
def test_trains_to_the_same_weights(name: str) -> None:
    """On two ranks with every strategy, and on one with a kept and a sharded gradient."""
    if HABITS[name].needs_te:
        pytest.importorskip("transformer_engine")
    case = random_case(fresh_seed()).but(num_layers=2, tied=False, positions="rope", batch=1)
    for world in (1, 2):
        run_ranks(check_habit, world, case, [name])
