"""Each row of a benchmark in processes of its own: one that hangs, crashes or runs out of memory
costs its own time limit and no other row."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from lib.bench_measure import Memory, Result, reason
from lib.bench_subjects import Subject, parse_subjects
from lib.bench_trace import Budget, Overlap, Trace, Work
from megatron_fsdp_adapter.prove.ranks import rendezvous

SCRIPT = Path(__file__).parents[1] / "benchmark.py"
GRACE_S = 10.0
"""Given to the other ranks when one has ended badly: they may yet say why they wait."""
SHORTEST_S = 15.0
"""A row is not begun with less than this left: libraries alone take that long to load."""


@dataclass(frozen=True)
class Limits:
    """Seconds: of one row, and of all of them."""

    row: float
    total: float

    def __post_init__(self) -> None:
        for name in ("row", "total"):
            if getattr(self, name) <= 0:
                flag = {"row": "--row-limit", "total": "--time-limit"}[name]
                raise ValueError(f"{flag} {getattr(self, name)}: must be more than 0 seconds")


@dataclass
class Apart:
    """Runs `command`, `ranks` processes for each row.

    Args:
        command: what measures; is given `--wrappers NAME --isolated --json FILE`.
        folder: for the log and the numbers of each row.
        limits: seconds.
        refuse: raises ValueError for a row that cannot run, before it is begun.
        note: is given the results so far after each row.
    """

    command: Sequence[str]
    ranks: int
    folder: Path
    limits: Limits
    refuse: Callable[[Subject], Any] = lambda subject: None
    note: Callable[[Sequence[Result]], None] = lambda results: None
    clock: Callable[[], float] = time.monotonic
    started: float = field(init=False)

    def __post_init__(self) -> None:
        self.started = self.clock()

    def run(self, subjects: Sequence[Subject], known: Sequence[Result] = ()) -> list[Result]:
        """In their order; rows of `known` that were measured are taken from there."""
        measured = {result.subject: result for result in known if result.error is None}
        results: list[Result] = []
        for subject in subjects:
            results.append(measured.get(subject) or self._row(subject))
            self.note(results)
        return results

    def _row(self, subject: Subject) -> Result:
        try:
            self.refuse(subject)
        except ValueError as error:
            return Result(subject, error=reason(error))
        left = self.limits.total - (self.clock() - self.started)
        if left < min(SHORTEST_S, self.limits.row):
            return Result(subject, error=f"not begun: --time-limit {self.limits.total:g} is over")
        name = subject.name.replace(":", "-").replace("@", "-")
        self.folder.mkdir(parents=True, exist_ok=True)
        numbers, log = self.folder / f"{name}.json", self.folder / f"{name}.log"
        numbers.unlink(missing_ok=True)
        arguments = ["--wrappers", subject.name, "--isolated", "--json", str(numbers)]
        failure = run_ranks(
            [*self.command, *arguments], self.ranks, min(left, self.limits.row), log
        )
        if numbers.is_file():  # written when the row was measured, whatever came after
            return from_plain(json.loads(numbers.read_text())["rows"][0])
        return Result(subject, error=f"{failure or 'no numbers'}; {last_line(log)}; see {log}")


def run_ranks(command: Sequence[str], ranks: int, limit: float, log: Path) -> str | None:
    """None, or what went wrong, when all processes have ended: by themselves, `GRACE_S` after one
    of them ended badly, or after `limit` seconds. Nothing of them is left, also when this process
    is killed. They are not torchrun's, whose workers outlive a killed launcher."""
    processes: list[subprocess.Popen[bytes]] = []
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
            return _wait(processes, limit)
        finally:
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_PR_SET_PDEATHSIG = 1


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


def from_plain(row: Mapping[str, Any]) -> Result:
    """The result that `as_plain` wrote, from a row of the JSON."""
    names = {item.name for item in dataclasses.fields(Result)}
    values = {name: value for name, value in row.items() if name in names}
    values["subject"] = parse_subjects(values["subject"])[0]
    if values["memory"] is not None:
        values["memory"] = Memory(**values["memory"])
    if values["trace"] is not None:
        trace = values["trace"]
        values["trace"] = Trace(
            Budget(**trace["budget"]), Overlap(**trace["overlap"]), Work(**trace["work"]),
            trace["parts"],
        )  # fmt: skip
    values["host"] = None if values["host"] is None else tuple(values["host"])
    values["steps"] = [(loss, norm) for loss, norm in values["steps"]]
    return Result(**values)


def beside_floors(results: Sequence[Result]) -> list[Result]:
    """With the median of the floor in the same precision as everyone's floor: rows that ran one
    after the other share no rounds, so a ratio is one of medians."""
    floors = {r.subject: median(r.seconds) for r in results if r.error is None}
    out = []
    for result in results:
        base = floors.get(result.subject.floor)
        seconds = [] if base is None else [base] * len(result.seconds)
        out.append(dataclasses.replace(result, floor_seconds=seconds))
    return out


def command(arguments: Sequence[str]) -> list[str]:
    """`benchmark.py` with these options."""
    return [sys.executable, str(SCRIPT), *arguments]
