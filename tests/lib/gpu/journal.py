"""A plugin of pytest that writes down what becomes of tests while they run, since the machine may
go away before they have all ended. `python -m tests.gpu` reads it.

    pytest -p tests.lib.gpu.journal --journal FILE --failures FILE tests/gpu/test_gpu_slots.py

Each line of the journal is written at once and as a whole, so that several runs may share a file.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

PASSED = "passed"
FAILED = "failed"
SKIPPED = "skipped"
LONGEST = 300
"""Characters of a reason."""
LACKS_MEMORY = (
    "out of memory",
    "OutOfMemory",
    "CUDA calloc",
    "ALLOC_FAILED",
    "cudaErrorMemoryAllocation",
)
"""What torch, NCCL and cuBLAS say where the device has no memory left."""


def append(path: Path, text: str) -> None:
    """Adds to a file that other processes add to."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def note(path: Path, **values: Any) -> None:
    """Adds a line of JSON."""
    append(path, json.dumps(values) + "\n")


def read(path: Path) -> list[dict[str, Any]]:
    """All lines; none if there is no file. A line that was cut short is left out."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return found


def reason(report: Any) -> str:
    """Why a test did not pass, in a line."""
    if report.skipped and isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")[:LONGEST]
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is not None:
        text = crash.message
    else:
        text = str(report.longrepr)
    lines = [line for line in text.splitlines() if line.strip()]
    # A rank's traceback is text: what was raised ends it.
    return " ... ".join(dict.fromkeys((*lines[:1], *lines[-1:])))[:LONGEST]


class Journal:
    def __init__(self, path: Path, failures: Path) -> None:
        self.path = path
        self.failures = failures
        self.seconds: dict[str, float] = {}

    def pytest_collectreport(self, report: Any) -> None:
        """A module that cannot be imported, or skips itself."""
        if not report.passed and report.nodeid.endswith(".py"):
            self._end(report, f"{report.nodeid}::collection", 0.0)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            note(self.path, test=item.nodeid)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        note(self.path, test=nodeid, begun=True)

    def pytest_runtest_logreport(self, report: Any) -> None:
        name = report.nodeid
        self.seconds[name] = self.seconds.get(name, 0.0) + report.duration
        if report.when == "call" or not report.passed:
            self._end(report, name, self.seconds[name])

    def _end(self, report: Any, name: str, seconds: float) -> None:
        why = "" if report.passed else reason(report)
        text = report.longreprtext if report.failed else ""
        if text:
            append(self.failures, f"{'=' * 30} {name}\n{text}\n")
        note(
            self.path,
            test=name,
            outcome=report.outcome,
            seconds=round(seconds, 1),
            why=why,
            lacked_memory=any(words in text for words in LACKS_MEMORY),
        )


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--journal", type=Path, help="lines of JSON; added to")
    parser.addoption("--failures", type=Path, help="tracebacks; added to")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--journal")
    failures = config.getoption("--failures")
    if path is not None:
        config.pluginmanager.register(Journal(path, failures or path.with_suffix(".failures")))
