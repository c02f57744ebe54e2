"""Runs replicas under torchft, kills and restarts them, and reads what they wrote."""

from __future__ import annotations

import contextlib
import json
import multiprocessing as mp
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.lib.elastic.replica import RANKS, Options, run_rank

PRELOADED = ("torchft", "tests.lib.elastic.replica")

LIGHTHOUSE = """
import sys, time
from torchft.coordination import LighthouseServer
server = LighthouseServer(
    bind=sys.argv[1], min_replicas=1, join_timeout_ms=int(sys.argv[2]), heartbeat_timeout_ms=1500
)
print(server.address(), flush=True)
sys.stdin.read()
"""

Line = dict[str, Any]
"""A line that a rank has written."""


class Replica:
    """The ranks of a replica, and what a launcher does with them."""

    def __init__(self, options: Options) -> None:
        self.options = options  # what it is started with
        self.processes: list[Any] = []  # its ranks; none before the first start
        self.starts = 0  # how often it was started

    def start(self) -> None:
        """Starts all ranks."""
        # Kept alive: it serves the ranks.
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        environment = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.store.port),
            "WORLD_SIZE": str(RANKS),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "RUST_LOG": "error",
        }
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(list(PRELOADED))
        self.starts += 1
        self.processes = []
        for rank in range(RANKS):
            process = context.Process(target=run_rank, args=(self.options, rank, environment))
            process.start()
            self.processes.append(process)

    def kill(self, ranks: Sequence[int] = range(RANKS)) -> None:
        """Kills some ranks, and waits until they are gone."""
        for rank in ranks:
            self.processes[rank].kill()
        for rank in ranks:
            self.processes[rank].join()

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to all ranks."""
        for process in self.processes:
            os.kill(process.pid, number)

    @property
    def codes(self) -> list[int | None]:
        """The exit codes of the ranks; None of those that run."""
        return [process.exitcode for process in self.processes]

    def log(self, rank: int = 0) -> list[Line]:
        """The lines that a rank has written, over all starts."""
        path = Path(self.options.folder, f"{self.options.replica}.{rank}.jsonl")
        if not path.exists():
            return []
        whole = path.read_text().rpartition("\n")[0]
        return [json.loads(line) for line in whole.splitlines()]

    def committed(self, rank: int = 0) -> list[Line]:
        """The lines of committed steps."""
        return [line for line in self.log(rank) if line["committed"]]

    @property
    def last_step(self) -> int:
        """The last step that it has committed; -1 before."""
        return max((line["step"] for line in self.committed()), default=-1)

    def text(self) -> str:
        """The end of what its ranks have printed."""
        found = []
        for rank in range(RANKS):
            path = Path(self.options.folder, f"{self.options.replica}.{rank}.txt")
            found.append(path.read_text(errors="replace")[-4000:] if path.exists() else "")
        return "\n".join(found)


class Lighthouse:
    """A lighthouse of torchft's, in a process of its own, inside a `with` block.

    join_timeout_ms: how long a quorum waits for replicas that live, from the first one on."""

    def __init__(self, join_timeout_ms: int = 200) -> None:
        self._join_timeout_ms = join_timeout_ms  # as given
        self.address = ""  # known once it was started
        self._bind = "[::]:0"

    def start(self) -> None:
        """Starts it, at the same address as before."""
        self._process = subprocess.Popen(
            [sys.executable, "-c", LIGHTHOUSE, self._bind, str(self._join_timeout_ms)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self._process.stdout is not None
        port = self._process.stdout.readline().strip().rpartition(":")[2]
        self.address = f"http://127.0.0.1:{port}"
        self._bind = f"[::]:{port}"

    def kill(self) -> None:
        """Kills it."""
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Lighthouse:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()


@contextlib.contextmanager
def running(found: Sequence[Replica]) -> Iterator[None]:
    """Starts these replicas, and kills them at the end of the block."""
    try:
        for one in found:
            one.start()
        yield
    finally:
        for one in found:
            one.kill()


@contextlib.contextmanager
def replicas(count: int, options: Options) -> Iterator[list[Replica]]:
    """That many replicas, which are started; killed at the end of the block."""
    found = [Replica(replace(options, replica=number)) for number in range(count)]
    with running(found):
        yield found


def wait_until(
    found: Sequence[Replica],
    is_so: Callable[[], bool],
    seconds: float = 600.0,
    may_end: Sequence[Replica] = (),
) -> None:
    """Waits until something is so. AssertionError after `seconds`, or if a rank ends meanwhile, but
    for those of `may_end`."""
    until = time.monotonic() + seconds
    while not is_so():
        ended = [one for one in found if one not in may_end and any(one.codes)]
        if ended or time.monotonic() > until:
            texts = []
            for one in found:
                texts.append(f"replica {one.options.replica}: {one.codes}\n{one.log()[-3:]}")
                texts.append(one.text())
            raise AssertionError("a rank ended, or nothing more came:\n" + "\n".join(texts))
        time.sleep(0.05)


def all_take(found: Sequence[Replica], steps: int, seconds: float = 600.0) -> None:
    """Waits until all have taken `steps` more steps together."""
    here = tuple(one.options.replica for one in found)

    def is_so() -> bool:
        logs = [one.committed()[-steps:] for one in found]
        for lines in logs:
            if len(lines) < steps or any(tuple(line["replicas"]) != here for line in lines):
                return False
        return True

    wait_until(found, is_so, seconds)
