"""Gradients that reach a parameter after its unit seemed done, outputs that pytree does not see,
containers that units fill, and gradients of inputs: plain modules train to the weights of the
unsharded module."""

from __future__ import annotations

import pytest

from tests.distributed.late_gradients import HABITS, check_habits
from tests.distributed.launch import run_ranks

pytestmark = pytest.mark.once


@pytest.mark.parametrize(
    ("world", "every"),
    [
        (2, False),
        pytest.param(2, True, marks=pytest.mark.full),
        (1, True),  # who reads released memory is seen at once
    ],
)
def test_trains_to_the_same_weights(world: int, every: bool) -> None:
    """By default each habit with ZeRO-3 and one of the other strategies."""
    run_ranks(check_habits, world, list(HABITS), every)
