"""Jobs that save into one root, as processes that note in a journal what they began and finished.

A job's state at an iteration is one number in all of its tensors, so a stored state tells the job
that stored it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_fsdp_adapter.checkpoint import AsyncSaver, CheckpointError, folders, save_checkpoint
from megatron_fsdp_adapter.checkpoint.convert import convert
from megatron_fsdp_adapter.megatron.compat.table import SAVES
from tests.lib.checkpoint.fires import Fire, Operations
from tests.lib.checkpoint.megatron_loop import NAMES, Loop
from tests.lib.megatron.stand_ins import stand_ins

NUMBERS = 2_500
"""Elements of a rank's tensor."""
CONVERTED = -1
"""Stands for the number of a checkpoint that was converted."""
ENDS_S = 0.3
"""Seconds that the other ranks of a job live on after one has died, as with a launcher."""
HANGS_S = 60.0


@dataclass(frozen=True)
class Step:
    """One save. by: the way to save (a method of `_Rank`)."""

    by: str
    iteration: int


@dataclass(frozen=True)
class Job:
    """on_term: what its handler of SIGTERM does: it sets a "flag", "saves", or "saves and ends".
    number: of this job, of which the numbers that it stores are made."""

    number: int
    ranks: int
    steps: tuple[Step, ...]
    keep: int | None
    fire: Fire
    on_term: str
    seed: int

    def value(self, iteration: int) -> int:
        return 1_000 * self.number + iteration


@dataclass
class Noted:
    """A save in the journal, in order of `begun`. finished: None for one of which nothing was
    heard; text: its error."""

    job: int
    by: str
    iteration: int
    value: int
    keep: int | None
    begun: int
    finished: bool | None = None
    text: str = ""
    others: list[int] = field(default_factory=list)


class Journal:
    """Lines of a file that survives its writers."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def note(self, **what: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(what) + "\n")

    def saves(self) -> list[Noted]:
        found: dict[tuple[int, int], Noted] = {}
        if not self.path.exists():
            return []
        for line in self.path.read_text().splitlines():
            told = json.loads(line)
            key = told["job"], told["save"]
            if "finished" in told:
                found[key].finished = told["finished"]
                found[key].text = told["text"]
            else:
                found[key] = Noted(told["job"], *told["what"], begun=len(found))
        return list(found.values())


class _Rank:
    """A rank of a job. Its methods save, each in one way."""

    def __init__(self, job: Job, rank: int, root: Path, journal: Journal, source: Path) -> None:
        self.job = job
        self.rank = rank
        self.root = root
        self.source = source
        self.journal = journal
        self.numbers = 0
        self.told = False  # SIGTERM has come
        self.saver = AsyncSaver()
        self.running: int | None = None  # the number of the saver's save
        self.queued: list[int] = []  # those of Megatron's queue
        self.loop: Any = None

    def state(self, iteration: int) -> dict[str, Any]:
        value = self.job.value(iteration)
        return {
            "model": {f"w{self.rank}": torch.full((NUMBERS,), float(value))},
            "number": value,
        }

    def _begin(self, by: str, iteration: int) -> int:
        self.numbers += 1
        if self.rank == 0:
            value = CONVERTED if by == "convert" else self.job.value(iteration)
            what = by, iteration, value, self.job.keep
            self.journal.note(job=self.job.number, save=self.numbers, what=what)
        return self.numbers

    def _end(self, number: int, error: BaseException | None = None) -> None:
        if self.rank == 0:
            text = f"{type(error).__name__}: {error}" if error else ""
            self.journal.note(job=self.job.number, save=number, finished=not error, text=text)

    @contextlib.contextmanager
    def _noted(self, number: int, ends: bool = True) -> Iterator[None]:
        """Notes how a save ends. An error that only this rank may have had ends the process."""
        try:
            yield
        except (CheckpointError, torch.distributed.checkpoint.CheckpointException) as error:
            self._end(number, error)
        except Exception as error:
            self._end(number, error)
            raise
        else:
            if ends:
                self._end(number)

    def plain(self, iteration: int) -> None:
        with self._noted(self._begin("plain", iteration)):
            save_checkpoint(self.root, iteration, self.state(iteration), self.job.keep)

    def background(self, iteration: int) -> None:
        self.settle()
        number = self._begin("background", iteration)
        self.running = number
        with self._noted(number, ends=False):
            self.saver.save(self.root, iteration, self.state(iteration), self.job.keep)
            return
        self.running = None

    def settle(self) -> None:
        """Waits for the saver's save."""
        number, self.running = self.running, None
        if number is not None:
            with self._noted(number):
                self.saver.wait()

    def megatron(self, iteration: int) -> None:
        module = self.loop.saving
        number = self._begin("megatron", iteration)
        folder = folders.final_folder(self.root, iteration)
        saved = False
        with self._noted(number, ends=False):
            if self.rank == 0:
                folder.mkdir(parents=True, exist_ok=True)
            writer = module.torch.distributed.checkpoint.FileSystemWriter(str(folder))
            module.torch.distributed.checkpoint.save(self.state(iteration), storage_writer=writer)
            dist.barrier()
            if self.rank == 0:
                self.loop._track(iteration)
            saved = True
        if saved:
            self._end(number)
        dist.barrier()

    def megatron_background(self, iteration: int) -> None:
        number = self._begin("megatron_background", iteration)
        with self._noted(number, ends=False):
            self.loop.save(iteration, self.state(iteration))
            self.queued.append(number)

    def finalize(self, blocking: bool) -> None:
        """As Megatron does in every iteration, and at the end."""
        while self.queued:
            with self._noted(self.queued[0], ends=False):
                done = self.loop.queue.maybe_finalize_async_calls(blocking)
                for number in self.queued[: len(done)]:
                    self._end(number)
                del self.queued[: len(done)]
                return
            del self.queued[0]

    def convert(self, iteration: int) -> None:
        number = self._begin("convert", iteration)
        target_format = "torch_dist" if self.job.seed % 2 else "fsdp_dtensor"
        try:
            convert(self.source, self.root, target_format)
        except (ValueError, OSError, CheckpointError) as error:
            self._end(number, error)
        else:
            self._end(number)

    def on_term(self, *_: Any) -> None:
        self.told = True
        if self.job.on_term != "flag":
            self.plain(self.job.steps[-1].iteration + 1)
        if self.job.on_term == "saves and ends":
            sys.exit(0)

    def run(self) -> None:
        for step in self.job.steps:
            told = torch.tensor(int(self.told and self.job.on_term == "flag"))
            dist.all_reduce(told, op=dist.ReduceOp.MAX)
            if told:
                self.plain(self.job.steps[-1].iteration + 1)
                break
            getattr(self, step.by)(step.iteration)
            self.finalize(blocking=False)
        self.finalize(blocking=True)
        self.settle()
        self.saver.close()


def _run_rank(job: Job, rank: int, root: Path, journal: Journal, source: Path, work: Path) -> None:
    """In a forked process."""
    warnings.simplefilter("always")
    store = work / f"store.{job.number}"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=job.ranks)
    runs = _Rank(job, rank, root, journal, source)
    with stand_ins(NAMES, SAVES) as modules:
        runs.loop = Loop(root, modules)
        signal.signal(signal.SIGTERM, runs.on_term)
        Operations(root, job.fire, rank, job.seed + rank).watch()
        runs.run()


def _fork(job: Job, rank: int, *given: Any) -> int:
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        work = given[-1]
        out = os.open(work / "stderr", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(out, 2)
        sys.stderr = os.fdopen(2, "w", buffering=1)
        _run_rank(job, rank, *given)
        status = 0
    except SystemExit:
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)
    raise AssertionError


def run_jobs(
    jobs: list[Job], root: Path, journal: Journal, source: Path, work: Path
) -> tuple[str, bool]:
    """Runs jobs at the same time to their ends; what they printed, and whether one hung."""
    work.mkdir()
    left: dict[int, Job] = {}
    for job in jobs:
        for rank in range(job.ranks):
            left[_fork(job, rank, root, journal, source, work)] = job
    dying: dict[int, float] = {}  # when the rest of a job is killed
    deadline = time.monotonic() + HANGS_S
    hung = False
    while left:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            job = left.pop(pid)
            if status:
                dying[job.number] = time.monotonic() + ENDS_S
            continue
        now = time.monotonic()
        hung = hung or now > deadline
        for pid, job in left.items():
            if hung or now > dying.get(job.number, now):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
    printed = work / "stderr"
    return printed.read_text() if printed.exists() else "", hung
