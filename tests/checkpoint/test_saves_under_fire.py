"""Random lives of a checkpoint root: kill -9, SIGTERM, a full disk and two jobs, at random moments
of plain, background and converting saves. Nothing that was finished is lost, and no error names a
cause that was not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lib.checkpoint.under_fire import FIRES, run_trials
from tests.lib.ranks.launch import run_ranks

CHECKS = (
    "checkpoint/running.py",
    "checkpoint/publishing.py",
    "checkpoint/asynchronous.py",
    "checkpoint/convert/conversion.py",
    "megatron/checkpoint/megatron_saves.py",
    "megatron/checkpoint/background_saves.py",
)

FEW = range(2 * len(FIRES))
MANY = range(len(FEW), len(FEW) + 200)


@pytest.mark.parametrize("seeds", [FEW, pytest.param(MANY, marks=pytest.mark.full)])
def test_nothing_finished_is_lost_and_nothing_false_is_said(tmp_path: Path, seeds: range) -> None:
    [found] = run_ranks(run_trials, 1, seeds, str(tmp_path), timeout=60.0 * len(seeds))
    skipped = [text for text in found.values() if text.startswith("skipped")]
    assert len(skipped) == len(found), "\n\n".join(found.values())
