"""Two ranks that run programs one after the other: on the host with gloo, or on GPUs with NCCL.

They live until they fail in different ways: then one may wait for the other. A program that fails
on both at the same line leaves them alive, so a failure is to be confirmed by a new pair.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import gc
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass, field
from multiprocessing import connection
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from tests.lib.hunt import comparing, faults
from tests.lib.hunt.language import SIDES, Shown
from tests.lib.ranks.ranks import end_with_parent

WORLD = 2
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
GRACE_S = 3.0
"""How long a rank may compute nothing before it fails too, once the other one has failed."""
LEAST_S = 0.05
"""A rank that has a processor for less is not computing: it waits."""
LOOK_S = 0.25
MOST_S = 120.0
"""Of a processor, for one program of two ranks."""
STACK_S = 0.5
"""How long it takes to write stacks."""
GROUP_S = 300.0
"""Timeout of the process group: longer than that of any program."""
LATE = (
    "torch._dynamo",
    "torch._functorch.eager_transforms",
    "torch.distributed._composable",
    "torch.distributed.tensor",
)
MOST_PROGRAMS = 400
"""A pair runs no more: what it keeps in memory ends with it."""


@dataclass
class Error:
    """An exception of a program. places: functions of the package that it passed, innermost last;
    line: the last line of the program that it passed."""

    type: str
    text: str
    places: list[str]
    line: int
    trace: str


@dataclass
class Report:
    """What a rank says of a program. error: of the side that failed, or None."""

    side: str = ""
    error: Error | None = None
    differences: list[comparing.Difference] = field(default_factory=list)
    compared: int = 0


@dataclass
class Ran:
    """What became of a program: a report of each rank, None of one that sent nothing in time.
    exits: exit codes of ranks that died; stacks: of ranks that were still running."""

    reports: list[Report | None]
    exits: dict[int, int] = field(default_factory=dict)
    stacks: dict[int, str] = field(default_factory=dict)


def _error(failure: BaseException) -> Error:
    frames = traceback.extract_tb(failure.__traceback__)
    places = []
    line = 0
    for frame in frames:
        if frame.filename == "program":
            line = frame.lineno or 0
        elif "/megatron_fsdp_adapter/" in frame.filename:
            module = frame.filename.rpartition("/megatron_fsdp_adapter/")[2]
            places.append(f"{module}:{frame.name}")
    is_ours = bool(frames) and "/megatron_fsdp_adapter/" in frames[-1].filename
    places += [] if is_ours or not places else ["..."]
    trace = "".join(traceback.format_exception(failure))
    return Error(type(failure).__name__, str(failure), places, line, trace[-4000:])


def _ran_on(sides: tuple[str, str], text: str) -> Report:
    """Runs a program on two sides, and compares them."""
    shown: list[Shown] = []
    for name in sides:
        try:
            shown.append(SIDES[name]().run(text))
        except Exception as failure:
            return Report(name, _error(failure))
    found = comparing.differences(*shown, loose="bfloat16" in text)
    return Report(differences=found, compared=len(shown[0]))


def _prepare_device(rank: int, device: str) -> None:
    """Makes models and inputs of programs on a device. Some fast attention has no second
    derivative, and is left out."""
    torch.set_num_threads(1)
    torch.backends.cuda.enable_flash_sdp(False)  # on the CPU too
    if device == "cuda":
        torch.backends.cuda.enable_mem_efficient_sdp(False)
        torch.backends.cuda.enable_cudnn_sdp(False)
        torch.cuda.set_device(rank % torch.cuda.device_count())
        torch.set_default_device("cuda")


def _serve(rank: int, folder: Path, pipe: Any, fault: str | None, device: str) -> None:
    """Runs the programs of the pipe until it is closed."""
    stacks = open(folder / f"stacks{rank}", "w")  # noqa: SIM115, open as long as the process
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
    end_with_parent()
    gc.freeze()  # modules: a collection after each program need not look at them
    _prepare_device(rank, device)
    store = dist.FileStore(str(folder / "store"), WORLD)
    timeout = datetime.timedelta(seconds=GROUP_S)
    backend = BACKENDS[device]
    dist.init_process_group(backend, store=store, rank=rank, world_size=WORLD, timeout=timeout)
    if fault is not None:
        faults.FAULTS[fault]()
    while True:
        try:
            sides, text = pipe.recv()
        except EOFError:
            return
        report = _ran_on(sides, text)
        gc.collect()
        pipe.send(report)


def _context() -> Any:
    """The server that forks ranks: it has imported everything, unless tests have started it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*LATE, "tests.lib.hunt.pair"])
    return context


class Pair:
    """The two processes; started when a program comes. fault: of `FAULTS`, which both have;
    device: "cpu", or "cuda", where ranks share a GPU if there is one alone."""

    def __init__(self, fault: str | None = None, device: str = "cpu") -> None:
        self.fault = fault
        self.device = device
        # None until a program comes, and after one that failed.
        self.folder: tempfile.TemporaryDirectory[str] | None = None
        # Of the two ranks.
        self.processes: list[Any] = []
        self.pipes: list[Any] = []
        # Programs that these processes have run.
        self.count = 0

    def start(self) -> None:
        """Forks both processes."""
        fork = _context()
        self.folder = tempfile.TemporaryDirectory()
        self.count = 0
        for rank in range(WORLD):
            mine, theirs = fork.Pipe()
            arguments = (rank, Path(self.folder.name), theirs, self.fault, self.device)
            process = fork.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(mine)
            self.processes.append(process)

    def end(self) -> None:
        """Kills both processes, if they run."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.join()
        for pipe in self.pipes:
            pipe.close()
        self.processes, self.pipes = [], []
        if self.folder is not None:
            self.folder.cleanup()
        self.folder = None

    def run(self, text: str, sides: tuple[str, str], quiet: float) -> Ran:
        """Runs a program on both ranks, until they have computed nothing for `quiet` seconds: how
        long a program takes depends on what else the machine does."""
        if self.folder is None or self.count >= MOST_PROGRAMS:
            self.end()
            self.start()
        self.count += 1
        for pipe in self.pipes:
            pipe.send((sides, text))
        ran = self._collected(quiet)
        errors = [report.error if report else None for report in ran.reports]
        lines = {error.line if error else 0 for error in errors}
        is_aborted = any(error and error.type == "CommunicationError" for error in errors)
        if None in ran.reports or len(lines) > 1 or is_aborted:
            self._look_at_failed(ran)
            self.end()
        return ran

    def _collected(self, quiet: float) -> Ran:
        """Reports of ranks, until those that are to come compute nothing for `quiet` seconds, or
        for `GRACE_S` after a failure, or have computed for `MOST_S`."""
        ran = Ran([None] * WORLD)
        waiting = dict(enumerate(self.pipes))
        began = self._computed(waiting)
        # The time they had computed when they last were seen to compute, and when that was.
        last, seen = began, time.monotonic()
        while waiting and time.monotonic() - seen < quiet:
            for pipe in connection.wait(waiting.values(), LOOK_S):
                rank = self.pipes.index(pipe)
                del waiting[rank]
                ran.reports[rank] = self._report(rank, ran)
                report = ran.reports[rank]
                if report is None or report.error is not None:
                    quiet = min(quiet, GRACE_S)
                last = self._computed(waiting)
            now = self._computed(waiting)
            if now - last >= LEAST_S:
                last, seen = now, time.monotonic()
            if now - began > MOST_S:
                break
        return ran

    def _report(self, rank: int, ran: Ran) -> Report | None:
        """The report that a rank sends; None if it has died."""
        try:
            return self.pipes[rank].recv()
        except (EOFError, ConnectionResetError):
            self.processes[rank].join()
            ran.exits[rank] = self.processes[rank].exitcode
            return None

    def _computed(self, ranks: Iterable[int]) -> float:
        """Seconds of a processor that the ranks have had."""
        total = 0.0
        for rank in ranks:
            with contextlib.suppress(psutil.NoSuchProcess):
                times = psutil.Process(self.processes[rank].pid).cpu_times()
                total += times.user + times.system
        return total

    def _look_at_failed(self, ran: Ran) -> None:
        """Adds stacks of ranks that still run or have crashed."""
        silent = [rank for rank, report in enumerate(ran.reports) if report is None]
        assert self.folder is not None
        for rank in silent:
            if rank not in ran.exits and self.processes[rank].is_alive():
                os.kill(self.processes[rank].pid, signal.SIGUSR1)
        if silent:
            time.sleep(STACK_S)
        for rank in silent:
            path = Path(self.folder.name) / f"stacks{rank}"
            ran.stacks[rank] = path.read_text() if path.exists() else ""
