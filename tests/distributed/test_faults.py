"""Faults end in the stated error, within the timeout, and the run that comes after goes on from the
last checkpoint as if nothing had happened (traps G2, R6, and "hang instead of error")."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from megatron_fsdp_adapter import fully_shard_model
from tests.distributed.gpt import build_trainer, init_megatron
from tests.distributed.launch import run_ranks, settle_ranks
from tests.distributed.mishaps import (
    CHANGES,
    TIMEOUT_S,
    Fault,
    changing,
    faulty_run,
    random_fault,
    resumed_runs,
)
from tests.distributed.shared_ranks import on_ranks
from tests.distributed.variants import everyones

STATED = re.compile(
    r"rank \d: (gathering weights|reducing gradients|broadcasting weights) of unit \S+ "
    r"\(phase [A-Z]+\) (in forward|in backward), between ranks \[0, 1\], failed: "
)
DIFFERS = "the ranks' models differ. First difference, place "


@on_ranks(2)
def test_models_that_differ_are_found_at_construction(rank: int) -> None:
    """With the first difference, alike on both ranks; nothing hangs, nothing is left in a group."""
    device = init_megatron()
    for name, (_, difference) in CHANGES.items():
        fault = Fault("other model", change=name)
        with pytest.raises(ValueError) as caught:
            build_trainer(fault.case, fault.strategy, device, changing(fault))
        assert DIFFERS in str(caught.value) and difference in str(caught.value), caught.value
    strategy = "optim" if rank else "optim_grads"
    told = "differ.*rank 0 has 'option strategy=optim_grads', rank 1"
    with pytest.raises(ValueError, match=told) as caught:
        build_trainer(Fault("").case, strategy, device)
    assert len(set(everyones(str(caught.value)))) == 1
    with pytest.raises(ValueError, match=r"fully_shard_model: .* rank 0 has 'parameter 0.bias"):
        fully_shard_model(nn.Sequential(nn.Linear(4, 5 + rank), nn.Linear(5 + rank, 3)))
    build_trainer(Fault("").case, "optim_grads_params", device)  # the groups are still usable


def check_fault(fault: Fault, root: Path) -> bool:
    """The fault ends as stated, in time; whether it left a checkpoint."""
    began = time.monotonic()
    outcomes = settle_ranks(
        faulty_run, 2, fault, str(root), timeout=90 + 3 * TIMEOUT_S, grace=3 * TIMEOUT_S
    )
    assert time.monotonic() - began < 90, fault
    texts = [str(value) for _, value in outcomes]
    assert any(outcome[0] for outcome in outcomes) == (fault.kind == "raised everywhere"), texts
    if fault.kind == "raised everywhere":
        assert texts == ["went on", "went on"], texts
    elif fault.kind == "other model":
        assert all(DIFFERS in text for text in texts), texts
        return False
    else:
        assert STATED.search(texts[1 - fault.rank]), (fault, texts)
    return True


ONE_BY_ONE = (
    Fault("killed", "decoder.layers.1.mlp.linear_fc1", "before", 1, rank=1),
    Fault("raised on one rank", "decoder.layers.1", "after", 2, rank=1, strategy="optim_grads"),
    Fault("late", "decoder.layers.0", "backward", 2, rank=0),
)


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, id=fault.kind, marks=pytest.mark.full if fault.kind == "late" else ())
        for fault in ONE_BY_ONE
    ],
)
def test_other_ranks_end_in_the_stated_error(fault: Fault, tmp_path: Path) -> None:
    """Naming unit, phase and pass."""
    assert check_fault(fault, tmp_path / "run")
    assert run_ranks(resumed_runs, 2, [(fault, str(tmp_path / "run"))]) == [1, 1]


@pytest.mark.full
def test_fifty_random_faults(tmp_path: Path) -> None:
    """None hangs, all end as stated, and what comes after continues exactly."""
    faults = [random_fault(seed) for seed in range(50)]
    runs: list[tuple[Fault, str]] = []
    for number, fault in enumerate(faults):
        root = tmp_path / str(number)
        if check_fault(fault, root):
            runs.append((fault, str(root)))
    resumed: list[Any] = run_ranks(resumed_runs, 2, runs, timeout=600)
    assert resumed == [len(runs)] * 2 and len(runs) == 40
