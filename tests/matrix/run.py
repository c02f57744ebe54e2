"""Runs cells: one set of processes for each number of ranks, cells looped inside.

A cell that fails or raises does not end the run. If a rank dies, or a cell takes longer than
`SLOWEST_S`, the cell is noted with what is known of it and a new set of processes goes on with the
next. Every outcome is written at once; a later run skips what has been done.
"""

from __future__ import annotations

import functools
import gc
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.distributed.shared_ranks import run_jobs
from tests.distributed.variants import everyones

from . import results
from .results import RAISED, Result, Setting
from .table import Cell, name_of
from .training import Finding, check_cell

SLOWEST_S = {"tiny": 100.0, "small": 60.0, "real": 120.0}
"""Of one cell and its reference, by width. A CPU machine may be shared."""
CROWDED_BYTES = 40 * 2**30
"""Of device memory that a set of processes still holds after a cell: stock DDP, the reference, is
not given back as a whole (its hooks are cycles), so that wide cells fill a GPU."""

Check = Callable[[Cell, str], Mapping[str, Finding]]


class Crowded(RuntimeError):
    """The processes hold too much memory for another cell."""


@functools.cache
def _side_group(timeout_s: float) -> Any:
    """On the host, for what ranks tell each other after a cell that may have failed on some."""
    return dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))


@dataclass(frozen=True)
class CellJob:
    """A cell as a job of `run_jobs`, which writes its result to a file. It is not begun after the
    deadline (`time.time()`). `check` trains a cell and measures it."""

    cell: Cell
    setting: Setting
    results: str
    deadline: float
    seconds: float
    check: Check
    whole: bool = False

    @property
    def world(self) -> int:
        return int(self.cell["ranks"])

    def run(self, rank: int, root: Path) -> None:
        """Raises after an error that leaves processes which cannot be trusted, or hold too much
        memory."""
        side = _side_group(self.seconds + 60)
        if everyones(time.time() > self.deadline, side)[0]:
            return
        started = time.monotonic()
        measures, error = self._attempt()
        try:
            found = everyones((measures, error, _is_healthy()), side)
        except RuntimeError as alone:
            raise RuntimeError(error or "another rank has ended") from alone
        errors = [f"rank {i}: {e}" for i, (_, e, _) in enumerate(found) if e]
        if rank == 0:
            outcome = results.verdict([measures for measures, _, _ in found])
            raised = {"status": RAISED, "problems": errors}
            self.append(time.monotonic() - started, raised if errors else outcome)
        gc.collect()
        if torch.cuda.is_available() and _is_healthy():
            torch.cuda.empty_cache()
        if errors and (len(errors) < self.world or not all(healthy for _, _, healthy in found)):
            raise RuntimeError("\n".join(errors))
        if any(everyones(_is_crowded(), side)):
            raise Crowded

    def _attempt(self) -> tuple[dict[str, Any], str | None]:
        """(measures of this rank, what was raised or None)."""
        try:
            found = self.check(self.cell, self.setting.width)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            return {name: (f.error, f.bound, f.where) for name, f in found.items()}, None
        except Exception as error:
            return {}, _told(error)

    def append(self, seconds: float, outcome: Mapping[str, Any]) -> None:
        setting = self.setting
        result = Result(
            name_of(self.cell), setting.digest(self.cell), setting.width, setting.poison,
            seconds=round(seconds, 1), **outcome,
        )  # fmt: skip
        results.append(Path(self.results), result)
        print(f"{result.status:8} {seconds:5.1f} s  {result.cell}", flush=True)


def _told(error: Exception, frames: int = 7) -> str:
    """An error in a line or a few: what, and the innermost frames outside of torch."""
    stack = [f for f in traceback.extract_tb(error.__traceback__) if "/torch/" not in f.filename]
    places = [
        f"{'/'.join(Path(f.filename).parts[-2:])}:{f.lineno} {f.name}" for f in stack[-frames:]
    ]
    return f"{type(error).__name__}: {str(error)[:1500]} ({' < '.join(reversed(places))})"


def _is_healthy() -> bool:
    """Whether the device still works: an error inside of a capture or a kernel may end it."""
    try:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.rand(1, device="cuda").item()  # a capture that failed leaves generators behind
        return True
    except Exception:
        return False


def _is_crowded() -> bool:
    return torch.cuda.is_available() and torch.cuda.memory_allocated() > CROWDED_BYTES


def run(
    cells: Sequence[Cell],
    setting: Setting,
    path: Path,
    seconds: float = 1e9,
    slowest_s: float | None = None,
    check: Check = check_cell,
) -> list[Result]:
    """Runs what is left of `cells`, for about so many seconds; all results of the file. A cell may
    take `slowest_s`, by default what is right for the width."""
    deadline, limit = time.time() + seconds, slowest_s or SLOWEST_S[setting.width]
    path.parent.mkdir(parents=True, exist_ok=True)
    backend = "nccl" if setting.device == "cuda" else "gloo"
    done = results.known(results.read(path))
    left = [
        CellJob(cell, setting, str(path), deadline, limit, check)
        for cell in cells if setting.digest(cell) not in done
    ]  # fmt: skip
    for world in sorted({job.world for job in left}):
        for job, error in run_jobs([job for job in left if job.world == world], backend):
            if error and setting.digest(job.cell) not in results.known(results.read(path)):
                job.append(0.0, {"status": RAISED, "problems": [error[-3000:]]})
    found = results.read(path)
    print(results.report(cells, setting, found))
    return found
