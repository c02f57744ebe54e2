"""Checkpoints go from Megatron's bundled FSDP engine (core 0.16.1) to ours, and back.

The engine runs on the CPU by the views of `bundled.py`. With optimizer state it is on one rank: on
two it fails or hangs while it saves, as its ranks hold state of different parameters and exchange
something for each. Ours is on two ranks, with each strategy that shards differently.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.lib.checkpoint.interop import assert_same, half, run_bundled, run_ours
from tests.lib.ranks.launch import run_ranks

CHECKS = ("checkpoint/training.py", "state/names.py", "megatron/optimizer/optimizer_state.py")


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
