"""Ranks that can never go on, with NCCL: kernels that wait for each other end, and all ranks raise
one error. Ranks that are late do not."""

from __future__ import annotations

import sys

import pytest

from tests.lib.gpu.gpu_ranks import WORLD
from tests.lib.plain.waits import LATE, WAYS, error_of, reported
from tests.lib.ranks.launch import run_ranks, settle_ranks

CHECKS = ("core/comm/wait_watch.py", "core/comm/abort.py", "core/engine/launches.py")

UNPROVED = ("an evaluation beside a barrier",)
"""The host of both ranks is in the barrier: with NCCL nothing tells which one the device is in."""
ENOUGH_S = 60.0
"""The process groups' timeout is 120 s."""
OF_ONE = ("an exception", "an early end")
"""In these one rank ends in another error."""
MATCHED = ("a unit skipped", "another order")
"""Kernels of equal size find each other in these. The comparison at the end of a step may then be
first."""


@pytest.mark.parametrize("name", [name for name in WAYS if name not in UNPROVED])
def test_ranks_that_differ_raise_one_error_within_seconds(name: str) -> None:
    outcomes = settle_ranks(error_of, WORLD, name, "cuda", timeout=150.0, backend="nccl", grace=60)
    for rank, (_, told) in enumerate(outcomes):
        print(f"{name}: rank {rank}: {told}", file=sys.stderr)
    if name in MATCHED and not outcomes[0][0]:
        assert all("launched different collectives" in str(told) for _, told in outcomes), outcomes
        return
    (ok, found), (other_ok, other) = outcomes
    assert ok, outcomes
    text, seconds = found
    print(f"{name}: after {seconds:.1f} s: {text}", file=sys.stderr)
    assert "can never go on" in text, text
    assert seconds < ENOUGH_S
    if name not in OF_ONE:
        assert other_ok and other[0] == text, outcomes


@pytest.mark.parametrize("name", LATE)
def test_a_rank_that_is_late_is_no_error(name: str) -> None:
    late = run_ranks(reported, WORLD, name, "cuda", timeout=150.0, backend="nccl")
    for lines, weights in late:
        print(f"{name}: {lines}", file=sys.stderr)
        assert all("can never go on" not in line for line in lines), lines
        assert weights == late[0][1]
