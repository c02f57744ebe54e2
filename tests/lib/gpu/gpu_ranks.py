"""Many checks in one pair of processes: importing Megatron and Transformer Engine and setting up
NCCL takes far longer than most checks.

Outcomes are written to a file as they come, and a test ends when its check has. Checks behind one
that hangs, or ends its processes, go on in new ones.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib.util
import json
import multiprocessing
import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.lib.gpu.shared_device import PATIENCE
from tests.lib.ranks.launch import run_ranks

WORLD = 2
SLOWEST_S = 60
"""How long one rank may be in a check after the other has left it."""
BEHIND_S = 20
"""The same after the other has raised, which usually leaves this one in a collective for good."""
STACKS = "GPU_TEST_STACKS"
"""Names a file to which each rank adds where it is when a check takes longer than `SLOW_S`."""
SLOW_S = 75
CROWDED_BYTES = 40 * 2**30
"""Of the device's memory, more than it once was, after a check: stock DDP is not given back as a
whole (its hooks are cycles), and communicators, which torch does not count, pile up. New processes
go on then."""


NEEDS: Mapping[str, tuple[Callable[[], bool], str]] = {
    "te": (
        lambda: importlib.util.find_spec("transformer_engine") is not None,
        "Transformer Engine is not installed",
    ),
    "fp8": (
        lambda: torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9),
        "this GPU has no FP8",
    ),
}
"""What checks may need beside GPUs: whether it is there, and why they are skipped without."""


DETERMINISTIC = {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}


@dataclass(frozen=True)
class Check:
    """`function(rank, world, *arguments)` raises AssertionError, or returns what to print."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...] = ()


def _write(path: str, **line: Any) -> None:
    with Path(path).open("a") as file:
        file.write(json.dumps(line) + "\n")


def used_bytes() -> int:
    """Of the device's memory, whatever uses it; 0 without a GPU."""
    free, total = torch.cuda.mem_get_info() if torch.cuda.is_available() else (0, 0)
    return total - free


def _run_all(rank: int, world: int, checks: Mapping[str, Check], path: str) -> None:
    """Every check on this rank; the first rank writes a line for each one that it begins, and for
    each one that all have left."""
    side = dist.new_group(backend="gloo", timeout=timedelta(seconds=SLOWEST_S * PATIENCE))
    stacks = open(f"{os.environ[STACKS]}.{rank}", "a") if STACKS in os.environ else None  # noqa: SIM115
    least = used_bytes()
    for name, check in checks.items():
        started = time.monotonic()
        error = None
        value = None
        if rank == 0:
            _write(path, begun=name)
        if stacks is not None:
            print(name, file=stacks, flush=True)
            faulthandler.dump_traceback_later(SLOW_S, file=stacks)
        try:
            value = check.function(rank, world, *check.arguments)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        except Exception:
            error = f"rank {rank}: {traceback.format_exc()}"
            _write(path, raised=name, error=error)
        faulthandler.cancel_dump_traceback_later()
        gc.collect()
        torch.cuda.empty_cache()
        used = used_bytes()
        least = min(least, used)  # other processes of the device may have ended
        told: list[Any] = [None] * world
        dist.all_gather_object(told, (error, used - least > CROWDED_BYTES), group=side)
        if rank == 0:
            raised = [error for error, _ in told if error is not None]
            seconds = round(time.monotonic() - started, 1)
            _write(path, name=name, errors=raised, value=repr(value), seconds=seconds)
        if any(crowded for _, crowded in told):
            return


class Outcomes:
    """Runs the checks on `world` ranks, from when the first outcome is asked for, beside the tests
    that ask. `timeout_s`: of all of them; `needs`: names of `NEEDS`, of every check;
    `environment`: variables of the ranks."""

    def __init__(
        self,
        checks: Mapping[str, Check],
        timeout_s: float,
        world: int = WORLD,
        backend: str = "nccl",
        needs: tuple[str, ...] = (),
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.needs = needs
        self.environment = environment
        self.checks = checks
        self.timeout_s = timeout_s * PATIENCE
        self.world = world
        self.backend = backend
        self._lines: dict[str, Any] = {}
        self._changed = threading.Condition()
        self._runner: threading.Thread | None = None
        self._closed = False

    def _run(self) -> None:
        """Each set of processes leaves at least one check less."""
        until = time.monotonic() + self.timeout_s
        try:
            while left := {n: c for n, c in self.checks.items() if n not in self._lines}:
                known = len(self._lines)
                fault, begun = self._attempt(left, max(1.0, until - time.monotonic()))
                lost = [name for name in left if name not in self._lines]
                over = self._closed or time.monotonic() >= until
                if not over and (begun is not None or len(self._lines) > known):
                    lost = [name for name in lost if name == begun]
                for name in lost:
                    self._note(name, errors=[f"{name} was not finished:\n{fault}"])
        except BaseException:
            for name in self.checks.keys() - self._lines.keys():
                self._note(name, errors=[traceback.format_exc()])
            raise

    def _attempt(self, checks: Mapping[str, Check], limit_s: float) -> tuple[str, str | None]:
        """(what ended the processes, the check that was begun and not finished)."""
        begun: list[str] = []
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "outcomes.jsonl"
            path.touch()
            over = threading.Event()
            follower = threading.Thread(target=self._follow, args=(path, over, begun), daemon=True)
            follower.start()
            try:
                with pytest.MonkeyPatch.context() as patch:  # of these alone: tests run meanwhile
                    for name, value in self.environment.items():
                        patch.setenv(name, value)
                    run_ranks(
                        _run_all,
                        self.world,
                        checks,
                        str(path),
                        timeout=limit_s,
                        backend=self.backend,
                    )
                fault = "its processes ended"
            except AssertionError as error:
                fault = str(error)
            finally:
                over.set()
                follower.join()
        return fault, next((name for name in begun if name not in self._lines), None)

    def _follow(self, path: Path, over: threading.Event, begun: list[str]) -> None:
        """Notes every line as it comes, until `over`, and what is there then."""
        raised: dict[str, tuple[float, str]] = {}
        with path.open() as file:
            rest = ""
            last = False
            while not last:
                last = over.wait(0.1)
                self._end_behind(raised)
                *lines, rest = (rest + file.read()).split("\n")
                for line in map(json.loads, lines):
                    if "begun" in line:
                        begun.append(line["begun"])
                    elif "raised" in line:
                        told = time.monotonic() + BEHIND_S, line["error"]
                        raised.setdefault(line["raised"], told)
                    else:
                        self._note(line.pop("name"), **line)

    def _end_behind(self, raised: dict[str, tuple[float, str]]) -> None:
        """Ends the processes of a check in which one rank has raised and another stays."""
        for name, (until, error) in list(raised.items()):
            if name in self._lines:
                del raised[name]
            elif time.monotonic() > until:
                self._note(name, errors=[f"{error}\nthe other rank stayed in the check"])
                self._kill()

    @staticmethod
    def _kill() -> None:
        for process in multiprocessing.active_children():
            process.kill()

    def _note(
        self, name: str, errors: list[str], value: str = "None", seconds: float = 0.0
    ) -> None:
        with self._changed:
            self._lines[name] = {"errors": errors, "value": value, "seconds": seconds}
            self._changed.notify_all()

    def _found(self, name: str) -> dict[str, Any]:
        """Waits for the outcome of a check."""
        with self._changed:
            if self._runner is None:
                self._runner = threading.Thread(target=self._run, daemon=True)
                self._runner.start()
            self._changed.wait_for(lambda: name in self._lines)
            return dict(self._lines[name])

    def close(self) -> None:
        """Ends the processes if they still run, as where a run of tests stops early."""
        self._closed = True
        if self._runner is not None and self._runner.is_alive():
            self._kill()
            self._runner.join()

    def expect(self, name: str) -> None:
        """Fails if the check `name` did, or was not reached; skips without what it needs."""
        for is_there, reason in (NEEDS[need] for need in self.needs):
            if not is_there():
                pytest.skip(reason)
        line = self._found(name)
        assert not line["errors"], "\n".join(line["errors"])
        print(f"{name}: {line['value']} ({line['seconds']} s)", file=sys.stderr)


def expecting(*sets: Outcomes) -> Callable[[str], None]:
    """A test for each check of all of them, which passes if that did."""

    @pytest.mark.parametrize("name", [name for one in sets for name in one.checks])
    def test(name: str) -> None:
        next(one for one in sets if name in one.checks).expect(name)

    return test
