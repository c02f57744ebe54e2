"""Processes of a command: none is left when the caller ends, however it does."""

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

from megatron_fsdp_adapter.prove.ranks import rendezvous

GRACE_S = 10.0
"""Given to the other ranks when one has ended badly: they may yet say why they wait."""

_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_PR_SET_PDEATHSIG = 1


def run_ranks(command: Sequence[str], ranks: int, limit: float, log: Path) -> str | None:
    """None, or what went wrong, when all processes have ended: by themselves, `GRACE_S` after one
    of them ended badly, or after `limit` seconds. Nothing of them is left, also when this process
    is killed. They are not torchrun's, whose workers outlive a killed launcher."""
    processes: list[subprocess.Popen[bytes]] = []
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output, rendezvous(ranks) as where:
        environment = {**os.environ, **where, "PYTHONUNBUFFERED": "1"}
        try:
            for rank in range(ranks):
                place = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                processes.append(
                    subprocess.Popen(
                        command, env={**environment, **place}, stdout=output,
                        stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
                        preexec_fn=_end_with_parent,
                    )
                )  # fmt: skip
            failure = _wait(processes, limit)
        finally:
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return failure and f"{failure}; {last_line(log)}; see {log}"


def _end_with_parent() -> None:
    """In a new process: a session of its own is out of reach of what kills the parent's."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _wait(processes: Sequence[subprocess.Popen[bytes]], limit: float) -> str | None:
    end = time.monotonic() + limit
    failure = None
    while time.monotonic() < end:
        codes = [process.poll() for process in processes]
        bad = next(((rank, code) for rank, code in enumerate(codes) if code), None)
        if bad is not None and failure is None:
            failure = f"rank {bad[0]} ended with status {bad[1]}"
            end = min(end, time.monotonic() + GRACE_S)
        if None not in codes:
            return failure
        time.sleep(0.05)
    return failure or f"not done after {limit:.0f} s"


def last_line(log: Path) -> str:
    """The last line of a log that says something, at most 200 characters."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    said = [line for line in lines if line and not line.startswith(("warn", "["))]
    return said[-1][:200] if said else "it printed nothing"
