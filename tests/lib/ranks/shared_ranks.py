"""Tests whose bodies run on ranks. All of a session that want the same number of ranks run one
after the other in one start of processes, which takes longer than most of them.

    @pytest.mark.parametrize("strategy", STRATEGIES)
    @on_ranks(2)
    def test_weights_are_alike(rank: int, strategy: str) -> None: ...

A body is given, of these names, those that it has: `rank`, `world`, `root` (a folder that its ranks
share, empty at first), `seed` (the same number on all ranks, another in each run, or that of
FSDP_TEST_SEED), and what `parametrize` above the decorator gives. `world` may be parametrized too.
Fixtures stay in the process that collects tests. A body ends all processes if it raises, and new
ones go on with the next; so it must leave no patch of another module behind.
"""

from __future__ import annotations

import faulthandler
import gc
import inspect
import json
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from _pytest.mark import ParameterSet
from _pytest.skipping import evaluate_skip_marks

from megatron_fsdp_adapter.megatron.compat import patches
from megatron_fsdp_adapter.megatron.compat.table import FUSED_WGRAD
from tests.lib.gpt.random_cases import fresh_seed
from tests.lib.ranks.groups import forget_groups
from tests.lib.ranks.launch import run_ranks

START_S = 60.0


def on_ranks(
    world: int | None = None, whole: bool = False, seconds: float = 120.0
) -> Callable[[Callable[..., None]], Any]:
    """Turns a body into a test. `whole`: one rank is a world of one, and does not stand for one of
    many. `seconds`: what the body may take on any rank."""

    def decorate(body: Callable[..., None]) -> Any:
        def test(shared_ranks: SharedRanks, request: pytest.FixtureRequest, **given: Any) -> None:
            shared_ranks.check(request.node)

        wanted = set(inspect.signature(body).parameters)
        given = wanted - {"rank", "root", "seed", "world"}
        names = ["shared_ranks", "request", *sorted(given)]
        if world is None and "row" not in wanted:
            names.append("world")
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        signature = inspect.Signature([inspect.Parameter(name, kind) for name in names])
        for name in ("__name__", "__qualname__", "__module__", "__doc__"):
            setattr(test, name, getattr(body, name))
        vars(test).update(
            __signature__=signature, body=body, world=world, whole=whole, seconds=seconds
        )
        return test

    return decorate


@dataclass(frozen=True)
class Job:
    """A test on ranks, by its name in its module. `places`: of each `parametrize` the position of
    what the test is given: values themselves need not be pickled."""

    module: str
    name: str
    places: tuple[int, ...]
    world: int
    whole: bool
    seconds: float
    seed: int

    @classmethod
    def of(cls, item: Any) -> Job:
        test = item.obj
        params = item.callspec.params if hasattr(item, "callspec") else {}
        places = tuple(
            next((at for at, row in enumerate(rows) if all(row[n] is params[n] for n in row)), -1)
            for rows in _tables(test)
        )  # -1: pytest skips what is given no values
        world = test.world or params.get("world") or params["row"].world
        return cls(
            item.module.__name__,
            test.__name__,
            places,
            world,
            test.whole,
            test.seconds,
            fresh_seed(),
        )

    def run(self, rank: int, root: Path) -> None:
        test = getattr(import_module(self.module), self.name)
        given = {"rank": rank, "world": self.world, "root": root, "seed": self.seed}
        for rows, place in zip(_tables(test), self.places, strict=True):
            given |= rows[place]
        wanted = inspect.signature(test.body).parameters
        test.body(**{name: value for name, value in given.items() if name in wanted})


def _tables(test: Any) -> list[list[dict[str, Any]]]:
    """The values of each `parametrize` of a test, by name."""
    found = []
    for mark in getattr(test, "pytestmark", ()):
        if mark.name == "parametrize":
            names, values = mark.args
            if isinstance(names, str):
                names = [n.strip() for n in names.split(",")]
            else:
                names = names
            sets = [ParameterSet.extract_from(v, len(names) == 1).values for v in values]
            found.append([dict(zip(names, one, strict=True)) for one in sets])
    return found


class SharedRanks:
    """Outcomes of a session's tests on ranks, which are run when the first of them is asked for."""

    def __init__(self, items: Sequence[Any]) -> None:
        found = []
        for item in items:
            if hasattr(getattr(item, "obj", None), "body") and not evaluate_skip_marks(item):
                found.append(item)
        self._jobs = {item.nodeid: Job.of(item) for item in found}
        self._errors: dict[Job, str] = {}

    def check(self, item: Any) -> None:
        wanted = self._jobs[item.nodeid]
        if wanted not in self._errors:
            alike = []
            for job in self._jobs.values():
                if (job.world, job.whole) == (wanted.world, wanted.whole):
                    alike.append(job)
            self._errors |= dict(run_jobs(alike))
        error = self._errors[wanted]
        assert not error, f"seed {wanted.seed}\n{error}"


def run_jobs(jobs: Sequence[Any], backend: str = "gloo") -> Iterator[tuple[Any, str]]:
    """Each with what went wrong in it, empty if nothing did. A job has what `Job` has of `run`,
    `world`, `whole` and `seconds`, the same number of ranks for all. A set of processes ends with
    the first error on any rank, and a new one goes on with the next job. Raises RuntimeError if
    processes do not get as far as a job."""
    left = list(jobs)
    while left:
        passed, error = _run_until_one_fails(left, backend)
        yield from zip(left[: passed + 1], [""] * passed + [error], strict=False)
        left = left[passed + 1 :]


def _run_until_one_fails(jobs: Sequence[Any], backend: str) -> tuple[int, str]:
    """The number that passed on all ranks, and the outcome of the next one."""
    said = ""
    world = jobs[0].world
    with tempfile.TemporaryDirectory() as folder:
        limit = START_S + sum(job.seconds for job in jobs)
        try:
            run_ranks(
                _run_on_rank,
                world,
                jobs,
                folder,
                timeout=limit,
                whole=jobs[0].whole,
                backend=backend,
            )
        except AssertionError as error:
            said = str(error)
        files = [_log(folder, rank) for rank in range(world)]
        logs = [file.read_text().splitlines() for file in files if file.exists()]
    if not logs:
        raise RuntimeError(f"no job was begun: {said[-6000:]}")
    outcomes = [[json.loads(line) for line in log if line.startswith("[")] for log in logs]
    passed = min(sum(error == "" for _, error in outcome) for outcome in outcomes)
    errors = [
        f"--- rank {rank}\n{error}"
        for rank, outcome in enumerate(outcomes)
        for index, error in outcome
        if index == passed and error
    ]
    stacks = [
        f"--- rank {rank} did not end\n" + "\n".join(lines)
        for rank, log in enumerate(logs)
        if (lines := [line for line in log if not line.startswith("[")])
    ]
    return passed, "\n".join([*errors, *stacks] or [said[-6000:]])


def _log(folder: str, rank: int) -> Path:
    return Path(folder) / f"rank{rank}"


def _run_on_rank(rank: int, world: int, jobs: Sequence[Any], folder: str) -> None:
    with _log(folder, rank).open("w") as log:
        for index, job in enumerate(jobs):
            root = Path(folder) / str(index)
            root.mkdir(exist_ok=True)
            faulthandler.dump_traceback_later(job.seconds, exit=True, file=log)
            error = _error_of(job, rank, root)
            faulthandler.cancel_dump_traceback_later()
            print(json.dumps([index, error]), file=log, flush=True)
            if error:
                raise RuntimeError(error)
            patches.uninstall(FUSED_WGRAD)
            forget_groups()
            torch.set_grad_enabled(True)
            gc.collect()
            gc.freeze()  # or each later collection goes through what modules keep


def _error_of(job: Any, rank: int, root: Path) -> str:
    try:
        job.run(rank, root)
    except BaseException:  # pytest's failures are no Exceptions
        return traceback.format_exc()
    return ""
