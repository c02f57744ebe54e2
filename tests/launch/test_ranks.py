"""Processes that give no answer say where each of them is."""

from __future__ import annotations

import signal
import socket
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests import ranks
from tests.distributed.launch import run_ranks


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


def _loops_of_groups(rank: int, world: int) -> tuple[float, int]:
    total = 0.0
    for _ in range(20):
        value = torch.ones(3)
        dist.all_reduce(value, group=dist.new_group())
        total += value.sum().item()
    names = [task.read_text().strip() for task in Path("/proc/self/task").glob("*/comm")]
    return total, names.count("gloo_tcp_loop")


def test_groups_of_gloo_share_the_thread_that_wakes_up_for_them() -> None:
    """In tests; the default group has one of its own."""
    assert run_ranks(_loops_of_groups, 2) == [(120.0, 2)] * 2


def test_ranks_meet_at_a_port_that_nobody_can_take_before_they_come() -> None:
    with ranks.rendezvous(2) as where, ranks.rendezvous(2) as other, socket.socket() as probe:
        assert where["MASTER_PORT"] != other["MASTER_PORT"]
        with pytest.raises(OSError, match="in use"):
            probe.bind(("127.0.0.1", int(where["MASTER_PORT"])))
