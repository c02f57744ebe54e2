"""Processes that give no answer say where each of them is."""

from __future__ import annotations

import signal
import threading
import time

import pytest

from tests import ranks


def _wait_for_ever() -> None:
    threading.Event().wait()


def _stuck(rank: int, world: int) -> None:
    if rank == 1:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        time.sleep(1e6)
    _wait_for_ever()


def test_ranks_that_do_not_answer_in_time_print_their_stacks() -> None:
    """Also one that takes no signal."""
    with pytest.raises(ranks.RanksError, match="no answer within 5 s") as raised:
        ranks.run_ranks(_stuck, 2, timeout=5.0)
    _, first, second = str(raised.value).split("--- rank")
    assert "_wait_for_ever" in first and "_wait_for_ever" not in second
    assert "in _stuck" in second
