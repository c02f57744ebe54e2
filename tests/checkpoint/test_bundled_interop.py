"""Checkpoints go from Megatron's bundled FSDP engine (core 0.16.1) to ours, and back.

The engine runs on the CPU by the views of `bundled.py`. With optimizer state it is on one rank: on
two it fails or hangs while it saves, as its ranks hold state of different parameters and exchange
something for each. Ours is on two ranks, with each strategy that shards differently.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.lib.checkpoint.interop import (
    assert_same,
    half,
    load_experts,
    rewrite_as_version_2,
    run_bundled,
    run_bundled_experts,
    run_ours,
)
from tests.lib.checkpoint.reshard_cases import ZERO1, ZERO2, ZERO3, split_of
from tests.lib.ranks.launch import run_ranks

CHECKS = (
    "checkpoint/training.py",
    "checkpoint/fitting.py",
    "state/names.py",
    "megatron/optimizer/optimizer_state.py",
)


@pytest.mark.full
@pytest.mark.parametrize(
    ("saves", "strategy"),
    [("bundled", "optim_grads_params"), ("bundled", "optim"), ("ours", "optim_grads_params")],
)
def test_a_checkpoint_of_each_engine_loads_in_the_other(
    tmp_path: Path, saves: str, strategy: str
) -> None:
    """Weights and moments bit for bit; training goes on with the same losses."""
    loads = {"bundled": "ours", "ours": "bundled"}[saves]
    written = half(saves, "save", str(tmp_path), strategy)
    assert_same(written, half(loads, "load", str(tmp_path), strategy))


TARGETS = (
    split_of(2, ZERO3, ep=2),
    replace(split_of(2, ZERO2, ep=1), of_experts=ZERO1),
    replace(split_of(4, ZERO3, ep=2, outer="optim"), of_experts=ZERO1, expert_instances=1),
    replace(split_of(4, ZERO1, ep=2), of_experts=ZERO3, expert_instances=2, expert_outer="optim"),
)


@pytest.mark.full
@pytest.mark.parametrize("version", (1, 2))
def test_experts_of_the_bundled_engine_load_in_ours_under_any_split(
    tmp_path: Path, version: int
) -> None:
    """Weights, moments and steps, bit for bit, for several pairs of strategies and replicas."""
    gated = version == 1
    root = str(tmp_path)
    run_ranks(run_bundled_experts, 1, root, gated, timeout=300)
    if version == 2:
        rewrite_as_version_2(root)
    for target in TARGETS:
        found = run_ranks(load_experts, target.world, root, gated, target, timeout=300)
        assert found == [[]] * target.world, target


@pytest.mark.full
def test_weights_go_both_ways_between_two_ranks(tmp_path: Path) -> None:
    """Without optimizer state, which the bundled engine cannot save from two ranks."""
    first = str(tmp_path / "first")
    second = str(tmp_path / "second")
    written = run_ranks(run_ours, 2, "save", first, False, "optim_grads_params")[0]["whole"]
    run_ranks(run_bundled, 2, first, second, False)
    read = run_ranks(run_ours, 2, "load", second, False, "optim_grads")[0]["whole"]
    assert read
    for name, one in read.items():
        assert np.array_equal(one, written[name])
