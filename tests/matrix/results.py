"""What became of cells: a line of JSON each, in a file that several runs add to."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from .table import Cell, name_of

REPOSITORY = Path(__file__).resolve().parents[2]
SOURCES = ("megatron_fsdp_adapter/**/*.py", "tests/matrix/*.py", "tests/distributed/*.py")
PACKAGES = ("torch", "megatron-core", "transformer-engine")

PASSED, FAILED, RAISED = "passed", "failed", "raised"
"""Within all bounds; outside of one; an error, in the cell or in its reference, or no end."""


@cache
def code_digest() -> str:
    """Of everything that a result follows from: this code and the releases it runs with."""
    found = hashlib.sha256()
    for pattern in SOURCES:
        for path in sorted(REPOSITORY.glob(pattern)):
            if not path.name.startswith("test_"):
                found.update(str(path.relative_to(REPOSITORY)).encode() + path.read_bytes())
    for package in PACKAGES:
        try:
            found.update(importlib.metadata.version(package).encode())
        except importlib.metadata.PackageNotFoundError:
            found.update(b"none")
    return found.hexdigest()[:16]


@dataclass(frozen=True)
class Setting:
    """How cells are run; a result of another setting is another result. `code` is found out once,
    so that processes agree on it though a file be edited meanwhile."""

    width: str
    device: str
    poison: bool
    code: str = field(default_factory=code_digest)

    def digest(self, cell: Cell) -> str:
        words = [self.code, name_of(cell), self.width, self.device, str(self.poison)]
        return hashlib.sha256("\n".join(words).encode()).hexdigest()[:16]


@dataclass
class Result:
    """`measures`: name -> [error, bound, where] of the worst rank. `problems`: a line each."""

    cell: str
    digest: str
    width: str
    poison: bool
    status: str
    seconds: float
    measures: dict[str, list[Any]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def append(path: Path, result: Result) -> None:
    with path.open("a") as file:
        file.write(json.dumps(asdict(result)) + "\n")


def read(path: Path) -> list[Result]:
    """All results of a file, in its order; none if there is no file. A line that was cut short, as
    by a run that was killed, is left out."""
    if not path.exists():
        return []
    found = []
    for line in path.read_text().splitlines():
        try:
            found.append(Result(**json.loads(line)))
        except json.JSONDecodeError:
            continue
    return found


def known(results: Iterable[Result]) -> dict[str, Result]:
    """The last result of each digest."""
    return {result.digest: result for result in results}


def _used(error: float, bound: float) -> float:
    return error / bound if bound else math.inf * error if error else 0.0


def verdict(per_rank: Iterable[Mapping[str, tuple[float, float, str]]]) -> Mapping[str, Any]:
    """Status, measures and problems from what each rank measured: (error, bound, where)."""
    worst: dict[str, list[Any]] = {}
    for rank, measures in enumerate(per_rank):
        for name, (error, bound, where) in measures.items():
            had = worst.get(name)
            if had is None or not _used(*had[:2]) >= _used(error, bound):
                worst[name] = [error, bound, f"rank {rank}: {where}"]
    problems = [
        f"{name}: off by {error:.2e}, {bound:.2e} allowed ({where})"
        for name, (error, bound, where) in worst.items()
        if not error <= bound
    ]
    return {
        "status": FAILED if problems else PASSED, "measures": worst, "problems": problems,
    }  # fmt: skip


def report(wanted: Iterable[Cell], setting: Setting, results: Iterable[Result]) -> str:
    """What passed, what did not and by how much, and what was not run."""
    cells = list(wanted)
    by_digest = known(results)
    found = {name_of(cell): by_digest.get(setting.digest(cell)) for cell in cells}
    lines = ["outcomes"]
    for name, result in found.items():
        if result is None:
            lines.append(f"not run  {name}")
        elif result.status != PASSED:
            lines.append(f"{result.status}   {name}  ({result.seconds:.0f} s)")
            lines += [f"         {line[:600]}" for line in result.problems[:8]]
    counts = {
        status: sum(result is not None and result.status == status for result in found.values())
        for status in (PASSED, FAILED, RAISED)
    }
    counts["not run"] = sum(result is None for result in found.values())
    told = ", ".join(f"{count} {status}" for status, count in counts.items())
    poison = ", poisoned" if setting.poison else ""
    lines.append(f"matrix, {setting.width} width{poison}: {told}, of {len(cells)} cells")
    return "\n".join(lines)
