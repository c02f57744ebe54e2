"""Many checks in one pair of processes: importing Megatron and Transformer Engine and setting up
NCCL takes far longer than most checks.

Outcomes are written to a file as they come, so that a check that hangs loses only those after it.
"""

from __future__ import annotations

import ast
import gc
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.distributed.launch import run_ranks
from tests.gpu.shared_device import PATIENCE

WORLD = 2
SLOWEST_S = 60
"""How long one rank may be in a check after the other has left it."""


@dataclass(frozen=True)
class Check:
    """`function(rank, world, *arguments)` raises AssertionError, or returns what to print."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...] = ()


def _run_all(rank: int, world: int, checks: Mapping[str, Check], path: str) -> None:
    """Every check on this rank; the first rank writes a line for each one that all have left."""
    side = dist.new_group(backend="gloo", timeout=timedelta(seconds=SLOWEST_S * PATIENCE))
    for name, check in checks.items():
        started = time.monotonic()
        error, value = None, None
        try:
            value = check.function(rank, world, *check.arguments)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        except Exception:
            error = f"rank {rank}: {traceback.format_exc()}"
        errors: list[Any] = [None] * world
        dist.all_gather_object(errors, error, group=side)
        if rank == 0:
            line = {
                "name": name,
                "errors": [one for one in errors if one is not None],
                "value": repr(value),
                "seconds": round(time.monotonic() - started, 1),
            }
            with Path(path).open("a") as file:
                file.write(json.dumps(line) + "\n")
        gc.collect()
        torch.cuda.empty_cache()


class Outcomes:
    """Runs the checks once, on `world` ranks, when the first outcome is asked for."""

    def __init__(
        self,
        checks: Mapping[str, Check],
        timeout_s: float,
        world: int = WORLD,
        backend: str = "nccl",
    ) -> None:
        self.checks, self.timeout_s = checks, timeout_s * PATIENCE
        self.world, self.backend = world, backend
        self._lines: dict[str, Any] | None = None
        self._fault: str | None = None

    def _run(self) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "outcomes.jsonl"
            path.touch()
            try:
                run_ranks(
                    _run_all, self.world, self.checks, str(path),
                    timeout=self.timeout_s, backend=self.backend,
                )  # fmt: skip
            except AssertionError as error:
                self._fault = str(error)
            lines = [json.loads(line) for line in path.read_text().splitlines()]
        return {line["name"]: line for line in lines}

    def _found(self) -> dict[str, Any]:
        if self._lines is None:
            self._lines = self._run()
        return self._lines

    def values(self) -> dict[str, str]:
        """What each check said, or that it failed, for a table."""
        found = {name: self._found().get(name) for name in self.checks}
        return {
            name: "not reached" if line is None else "FAILED" if line["errors"]
            else f"{ast.literal_eval(line['value'])} ({line['seconds']} s)"
            for name, line in found.items()
        }

    def expect(self, name: str) -> None:
        """Fails if the check `name` did, or was not reached."""
        line = self._found().get(name)
        assert line is not None, f"{name} was not finished:\n{self._fault}"
        assert not line["errors"], "\n".join(line["errors"])
        print(f"{name}: {line['value']} ({line['seconds']} s)", file=sys.stderr)
