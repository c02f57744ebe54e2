"""What users do beside the plain loop, on NCCL: the functions of tests/distributed/habits.py."""

from __future__ import annotations

import importlib.util

import pytest

from tests.distributed.gpt import STRATEGIES
from tests.distributed.habits import HABITS, check_habit
from tests.distributed.random_cases import fresh_seed, random_case
from tests.gpu.gpu_ranks import Check, Outcomes

CASE = random_case(fresh_seed()).but(num_layers=2, tied=False, positions="rope", batch=1)
HAS_TE = importlib.util.find_spec("transformer_engine") is not None
CHECKS = {
    name: Check(check_habit, (CASE, [name], (STRATEGIES[number % 3], STRATEGIES[3])))
    for number, (name, habit) in enumerate(HABITS.items())
    if HAS_TE or not habit.needs_te
}
OUTCOMES = Outcomes(CHECKS, timeout_s=170.0)


@pytest.mark.parametrize("name", CHECKS)
def test_on_two_gpus(name: str) -> None:
    OUTCOMES.expect(name)
