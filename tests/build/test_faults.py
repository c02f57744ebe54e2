"""Faults end in the stated error, within the timeout, and the run that comes after goes on from the
last checkpoint as if nothing had happened (traps G2, R6, and "hang instead of error")."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp_adapter import fully_shard_model
from megatron_fsdp_adapter.build.same_model import first_difference
from tests.lib.gpt.gpt import build_trainer, init_megatron
from tests.lib.gpt.injected_faults import (
    CASE,
    CHANGES,
    TIMEOUT_S,
    Fault,
    changing,
    faulty_run,
    resumed_run,
)
from tests.lib.ranks.groups import everyones
from tests.lib.ranks.launch import run_ranks, settle_ranks
from tests.lib.ranks.shared_ranks import on_ranks

CHECKS = ("build/fault_report.py", "build/same_model.py", "core/engine/launches.py")

STATED = re.compile(
    r"rank \d: (gathering weights|reducing gradients|broadcasting weights) of unit \S+ "
    r"\(phase [A-Z]+\) (in forward|in backward), between ranks \[0, 1\], failed: "
)
ENDED = re.compile(
    r"rank 0 waits for the (weights|gradients) of `\S+` \(step 3\).*; rank 1 has ended \("
)
DIFFERS = "the ranks' models differ, first at place "


@on_ranks(2)
def test_models_that_differ_are_found_at_construction(rank: int) -> None:
    """With the first difference, alike on both ranks; nothing hangs, nothing is left in a group."""
    device = init_megatron()
    for name, (_, difference) in CHANGES.items():
        with pytest.raises(ValueError) as caught:
            build_trainer(CASE, "optim_grads_params", device, changing(name))
        assert DIFFERS in str(caught.value) and difference in str(caught.value), caught.value
    strategy = "optim" if rank else "optim_grads"
    told = "differ.*rank 0 has 'option strategy=optim_grads', rank 1"
    with pytest.raises(ValueError, match=told) as caught:
        build_trainer(CASE, strategy, device)
    assert len(set(everyones(str(caught.value)))) == 1
    with pytest.raises(ValueError, match=r"fully_shard_model: .* rank 0 has 'parameter 0.bias"):
        fully_shard_model(nn.Sequential(nn.Linear(4, 5 + rank), nn.Linear(5 + rank, 3)))
    build_trainer(CASE, "optim_grads_params", device)  # the groups are still usable


def test_processes_on_one_gpu_are_told_to_set_their_device(
    alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: Any, **options: Any) -> None:
        raise RuntimeError("Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 60")

    monkeypatch.setattr(dist, "all_gather_object", fails)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    with pytest.raises(RuntimeError, match=r"cuda:0 is .* Call torch\.cuda\.set_device"):
        first_difference(["a line"], [dist.group.WORLD])


ONE_BY_ONE = (
    Fault("killed", "decoder.layers.1.mlp.linear_fc1", "before", rank=1),
    Fault("raised on one rank", "decoder.layers.1", "after", rank=1, strategy="optim_grads"),
    Fault("late", "decoder.layers.0", "backward", rank=0),
)


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, id=fault.kind, marks=pytest.mark.full if fault.kind == "late" else ())
        for fault in ONE_BY_ONE
    ],
)
def test_other_ranks_end_in_the_stated_error(fault: Fault, tmp_path: Path) -> None:
    """Naming unit, phase and pass, within the timeout; or the rank that has ended, if it could."""
    began = time.monotonic()
    root = str(tmp_path / "run")
    outcomes = settle_ranks(
        faulty_run, 2, fault, root, timeout=90 + 3 * TIMEOUT_S, grace=3 * TIMEOUT_S
    )
    assert time.monotonic() - began < 90, fault
    assert not any(ended for ended, _ in outcomes), outcomes
    stated = ENDED if fault.kind == "raised on one rank" else STATED
    assert stated.search(str(outcomes[1 - fault.rank][1])), (fault, outcomes)
    run_ranks(resumed_run, 2, fault, root)
