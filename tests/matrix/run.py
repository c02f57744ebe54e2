"""Runs cells: one set of processes for each number of ranks, cells looped inside.

A cell that fails or raises does not end the run. If a rank dies, or a cell takes longer than
`SLOWEST_S`, the cell is noted with what is known of it and a new set of processes goes on with the
next. Every outcome is written at once; a later run skips what has been done.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.distributed.launch import settle_ranks

from . import results
from .results import RAISED, Result, Setting
from .table import Cell, name_of
from .training import Finding, Groups, check_cell

SLOWEST_S = {"tiny": 100.0, "small": 60.0, "real": 120.0}
"""Of one cell and its reference, by width. A CPU machine may be shared."""
START_S = 120.0
"""From the start of processes to the first cell."""
CROWDED_BYTES = 40 * 2**30
"""Of device memory that a set of processes still holds after a cell: stock DDP, the reference, is
not given back as a whole (its hooks are cycles), so that wide cells fill a GPU."""
STARTS = 4
"""Attempts to start processes: a port that was free may have been taken meanwhile."""


Check = Callable[[Cell, str, Groups], Mapping[str, Finding]]


@dataclass(frozen=True)
class Plan:
    """What a set of processes is given. `deadline`: no cell is begun after it (`time.time()`).
    `slowest_s`: what one cell may take. `notes`: a folder in which each rank notes what it is at.
    `check`: trains a cell and measures it."""

    cells: tuple[Cell, ...]
    setting: Setting
    results: str
    notes: str
    deadline: float
    slowest_s: float
    check: Check


def _note(plan: Plan, rank: int, **values: Any) -> None:
    path = Path(plan.notes) / f"rank{rank}"
    path.write_text(json.dumps(values))


def _attempt(cell: Cell, plan: Plan, groups: Groups) -> tuple[dict[str, Any], str | None]:
    """(measures of this rank, what was raised or None)."""
    try:
        found = plan.check(cell, plan.setting.width, groups)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return {name: (f.error, f.bound, f.where) for name, f in found.items()}, None
    except Exception as error:
        return {}, _told(error)


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


def _everyones(value: Any, group: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group=group)
    return values


def run_cells(rank: int, world: int, plan: Plan) -> str:
    """On a rank: all cells of the plan, or until the time is up, or until an error after which the
    processes cannot be trusted, or hold too much memory. Returns why it stopped."""
    side = dist.new_group(backend="gloo", timeout=timedelta(seconds=plan.slowest_s + 60))
    groups = Groups()
    stacks = (Path(plan.notes) / f"stacks{rank}").open("w")
    for cell in plan.cells:
        if _everyones(time.time() > plan.deadline, side)[0]:
            return "time"
        started = time.monotonic()
        _note(plan, rank, cell=name_of(cell), error=None)
        stacks.seek(0)
        stacks.truncate()
        faulthandler.dump_traceback_later(plan.slowest_s, exit=True, file=stacks)
        measures, error = _attempt(cell, plan, groups)
        if error:
            _note(plan, rank, cell=name_of(cell), error=error)
        found = _everyones((measures, error, _is_healthy()), side)
        faulthandler.cancel_dump_traceback_later()
        errors = [f"rank {i}: {e}" for i, (_, e, _) in enumerate(found) if e]
        if rank == 0:
            _write(plan, cell, time.monotonic() - started, [m for m, _, _ in found], errors)
        gc.collect()
        if torch.cuda.is_available() and _is_healthy():
            torch.cuda.empty_cache()
        if errors and (len(errors) < world or not all(healthy for _, _, healthy in found)):
            return "error"
        if any(_everyones(_is_crowded(), side)):
            return "memory"
    return "done"


def _write(
    plan: Plan, cell: Cell, seconds: float, measures: Sequence[Any], errors: list[str]
) -> None:
    outcome: Any = results.verdict(measures)
    if errors:
        outcome = {"status": RAISED, "problems": errors}
    _append(plan, cell, seconds, outcome)


def _append(plan: Plan, cell: Cell, seconds: float, outcome: Any) -> None:
    setting = plan.setting
    result = Result(
        name_of(cell), setting.digest(cell), setting.width, setting.poison,
        seconds=round(seconds, 1), **outcome,
    )  # fmt: skip
    results.append(Path(plan.results), result)
    print(f"{result.status:8} {seconds:5.1f} s  {result.cell}", flush=True)


def _note_fatal(plan: Plan, world: int, said: str) -> bool:
    """Writes down the cell at which the processes ended without an outcome; False if they had
    begun none."""
    notes = {}
    for rank in range(world):
        path = Path(plan.notes) / f"rank{rank}"
        if path.exists():
            notes[rank] = json.loads(path.read_text())
    if not notes:
        return False
    at = next(iter(notes.values()))["cell"]
    problems = [f"rank {r}: {n['error']}" for r, n in notes.items() if n["error"]]
    for rank in range(world):
        path = Path(plan.notes) / f"stacks{rank}"
        if path.exists() and path.read_text().strip():
            problems.append(f"rank {rank} did not end: {_innermost(path.read_text())}")
    problems = problems or [f"the processes ended: {said[-1500:]}"]
    cell = next(cell for cell in plan.cells if name_of(cell) == at)
    if plan.setting.digest(cell) not in results.known(results.read(Path(plan.results))):
        _append(plan, cell, 0.0, {"status": RAISED, "problems": problems})
    return True


def _innermost(stacks: str, frames: int = 8) -> str:
    """Of the main thread, which a dump has last; without torch's own frames."""
    thread = stacks.strip().split("\n\n")[-1].splitlines()[1:]
    told = [line.strip() for line in thread if "/torch/" not in line] or thread
    return " < ".join(line.replace("/site-packages", " ")[-90:] for line in told[:frames])


def run_world(world: int, plan: Plan) -> None:
    """All cells of the plan, which are of `world` ranks, that its file has no result of. Raises
    RuntimeError if processes do not get as far as a cell, several times."""
    starts = 0
    while True:
        done = results.known(results.read(Path(plan.results)))
        left = tuple(cell for cell in plan.cells if plan.setting.digest(cell) not in done)
        if not left or time.time() > plan.deadline:
            return
        for note in Path(plan.notes).iterdir():
            note.unlink()
        plan = replace(plan, cells=left)
        said = _settled(world, plan)
        if said is None:
            continue
        starts = 0 if _note_fatal(plan, world, said) else starts + 1
        if starts == STARTS:
            raise RuntimeError(f"no cell was begun in {STARTS} attempts: {said}")


def _settled(world: int, plan: Plan) -> str | None:
    """Runs the plan; what was said if the processes did not all return."""
    backend = "nccl" if plan.setting.device == "cuda" else "gloo"
    limit = START_S + (len(plan.cells) + 1) * plan.slowest_s
    try:
        found = settle_ranks(run_cells, world, plan, timeout=limit, backend=backend)
    except AssertionError as error:
        return str(error)
    wrong = [str(value) for ok, value in found if not ok]
    return "\n".join(wrong) if wrong else None


def run(
    cells: Sequence[Cell],
    setting: Setting,
    path: Path,
    notes: Path,
    seconds: float = 1e9,
    slowest_s: float | None = None,
    check: Check = check_cell,
) -> list[Result]:
    """Runs what is left of `cells`, for about so many seconds; all results of the file. A cell may
    take `slowest_s`, by default what is right for the width."""
    deadline = time.time() + seconds
    path.parent.mkdir(parents=True, exist_ok=True)
    notes.mkdir(parents=True, exist_ok=True)
    for world in sorted({int(cell["ranks"]) for cell in cells}):
        chosen = tuple(cell for cell in cells if cell["ranks"] == world)
        limit = slowest_s or SLOWEST_S[setting.width]
        run_world(world, Plan(chosen, setting, str(path), str(notes), deadline, limit, check))
    found = results.read(path)
    print(results.report(cells, setting, found))
    return found
