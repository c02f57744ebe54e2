"""What users do beside the plain loop, on NCCL: the rows of tests/distributed/habits.py."""

from __future__ import annotations

import pytest

from tests.distributed.habits import HABITS
from tests.distributed.random_cases import fresh_seed
from tests.distributed.variants import check_row
from tests.gpu.gpu_ranks import Check, Outcomes

CHECKS = {
    row.name: Check(check_row, ("tests.distributed.habits", "HABITS", row.name, fresh_seed()))
    for row in HABITS
}
OUTCOMES = Outcomes(CHECKS, timeout_s=170.0)


@pytest.mark.parametrize("name", CHECKS)
def test_on_two_gpus(name: str) -> None:
    OUTCOMES.expect(name)
