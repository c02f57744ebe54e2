"""Runs a command in several processes, one for each rank. They end with the caller."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

GRACE_S = 10.0
"""Seconds that other ranks may run after one has failed, so that they can report errors."""

_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_PR_SET_PDEATHSIG = 1


def run_ranks(command: Sequence[str], ranks: int, limit: float, log: Path) -> str | None:
    """Runs a process for each rank; returns None, or the error as text.

    They run until all have ended, one has failed `GRACE_S` seconds ago, or `limit` seconds are
    over. All end with this process, even if it is killed; torchrun's workers would outlive it."""
    processes: list[subprocess.Popen[bytes]] = []
    log.parent.mkdir(parents=True, exist_ok=True)
    # Its port stays in use; a free port passed to rank 0 could be taken before it listens.
    store = dist.TCPStore("127.0.0.1", 0, ranks, is_master=True, wait_for_workers=False)
    environment = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": str(ranks),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "PYTHONUNBUFFERED": "1",
    }
    with log.open("wb") as output:
        try:
            for rank in range(ranks):
                place = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                process = subprocess.Popen(
                    command,
                    env={**environment, **place},
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                    preexec_fn=_end_with_parent,
                )
                processes.append(process)
            failure = _wait(processes, limit)
        finally:
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return failure and f"{failure}; {last_line(log)}. See {log}"


def _end_with_parent() -> None:
    """Runs in a new process: the kernel kills it when its parent ends. Signals to the parent's
    session do not reach its own session."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _wait(processes: Sequence[subprocess.Popen[bytes]], limit: float) -> str | None:
    """Waits for the processes as `run_ranks` says; returns None, or the error."""
    end = time.monotonic() + limit
    failure = None
    while time.monotonic() < end:
        codes = [process.poll() for process in processes]
        for rank, code in enumerate(codes):
            if code and failure is None:
                failure = f"rank {rank} ended with status {code}"
                end = min(end, time.monotonic() + GRACE_S)
        if None not in codes:
            return failure
        time.sleep(0.05)
    return failure or f"not done after {limit:.0f} s"


def last_line(log: Path) -> str:
    """The last line of a log, at most 200 characters, without empty lines, warnings, and lines that
    begin with a bracket."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    said = [line for line in lines if line and not line.startswith(("warn", "["))]
    if not said:
        return "it printed nothing"
    return said[-1][:200]
