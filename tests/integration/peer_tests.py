"""The plugin and the table of scripts/peer_tests.sh.

As a pytest plugin it puts this package's wrapper in the place of Megatron's, before a test module
imports that by name, and writes down what became of each test on this rank. As a script it prints
what became of each test on all ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = "test_mcore_fully_sharded_data_parallel.py"
CLASS = "FullyShardedDataParallel"


@dataclass(frozen=True)
class Expected:
    """Tests that cannot pass, whoever is wrapped: by a pattern of their ids, and why.
    `world_size`: with so many ranks they can; None: never."""

    pattern: str
    world_size: int | None
    why: str


EXPECTED: tuple[Expected, ...] = (
    Expected(
        r"test_fsdp_(with_process_groups|user_buffer_registration)\[8",
        8,
        "it makes a grid of 8 ranks before it asks how many there are",
    ),
    Expected(
        r"test_fsdp_with_process_groups\[2\]",
        2,
        "it makes a grid of 2 ranks, and skips itself with any other number",
    ),
)


# The plugin.


def pytest_configure(config: Any) -> None:
    """Before any test module is imported."""
    if os.environ["PEER_TESTS_WHO"] == "ours":
        from megatron_fsdp_adapter import install

        install()


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Makes sure that what is tested is what the table says."""
    ours = os.environ["PEER_TESTS_WHO"] == "ours"
    for module in {item.module for item in items}:
        wrapper = getattr(module, CLASS)
        if wrapper.__module__.startswith("megatron_fsdp_adapter.") != ours:
            raise RuntimeError(f"{module.__name__}.{CLASS} is {wrapper.__module__}'s")


def pytest_runtest_logreport(report: Any) -> None:
    """One line for each phase of a test that failed or was skipped, and for each call."""
    if report.when != "call" and report.outcome == "passed":
        return
    rank = os.environ.get("RANK", "0")
    function = os.environ["PEER_TESTS_FUNCTION"]
    row = {
        "test": report.nodeid.partition(f"{FILE}::")[2],
        "when": report.when,
        "outcome": report.outcome,
        "reason": _reason(report),
    }
    with Path(os.environ["PEER_TESTS_OUT"], f"{function}.{rank}.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


def _reason(report: Any) -> str:
    """The last error of a failure, or why a test was skipped, on one line."""
    if report.outcome == "passed":
        return ""
    if isinstance(report.longrepr, tuple):  # skipped: file, line, reason
        return str(report.longrepr[2])
    crash = getattr(report.longrepr, "reprcrash", None)
    text = str(crash.message if crash is not None else report.longrepr)
    return " ".join(text.split())[:300]


def pytest_unconfigure() -> None:
    """Ends the process without waiting for other ranks, which may have failed elsewhere: all that
    is wanted of it is on disk."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


# The table.


def results(folder: Path) -> dict[str, dict[str, list[dict[str, str]]]]:
    """Rows by rank for each test that any rank came to the end of; one kind of wrapper's folder."""
    found: dict[str, dict[str, list[dict[str, str]]]] = {}
    for path in sorted(folder.glob("*.jsonl")):
        rank = path.name.split(".")[-2]
        for line in path.read_text().splitlines():
            row = json.loads(line)
            found.setdefault(row["test"], {}).setdefault(rank, []).append(row)
    return found


def verdict(by_rank: Mapping[str, list[dict[str, str]]], world_size: int) -> tuple[str, str]:
    """("passed", "skipped", "failed" or "not finished", reason) of a test on all ranks."""
    rows = [(rank, row) for rank, held in sorted(by_rank.items()) for row in held]
    for outcome in ("failed", "skipped"):
        for rank, row in rows:
            if row["outcome"] == outcome:
                return outcome, f"rank {rank}, {row['when']}: {row['reason']}"
    if not by_rank:
        return "not finished", "no rank came to its end"
    if len(by_rank) < world_size:
        return "not finished", f"only ranks {', '.join(sorted(by_rank))} came to its end"
    return "passed", ""


def expected_failure(test: str, world_size: int) -> str | None:
    """Why `test` cannot pass with so many ranks; None if it should."""
    for row in EXPECTED:
        if re.search(row.pattern, test) and row.world_size != world_size:
            return row.why
    return None


def table(folders: Mapping[str, Path], world_size: int) -> tuple[list[str], bool]:
    """The lines, and whether everything of ours that can pass has passed."""
    found = {who: results(folder) for who, folder in folders.items()}
    tests = sorted({test for held in found.values() for test in held})
    width = max((len(test) for test in tests), default=4)
    lines, good = [f"{'test':<{width}}  " + "  ".join(f"{who:<12}" for who in found)], bool(tests)
    remarks: list[str] = []
    for test in tests:
        cells = {who: verdict(held.get(test, {}), world_size) for who, held in found.items()}
        lines.append(
            f"{test:<{width}}  " + "  ".join(f"{cell[0]:<12}" for cell in cells.values())
        )
        why = expected_failure(test, world_size)
        good &= cells.get("ours", ("passed", ""))[0] == "passed" or why is not None
        remarks += _remarks(test, cells, why)
    return [*lines, "", *remarks], good


def _remarks(test: str, cells: Mapping[str, tuple[str, str]], why: str | None) -> Iterator[str]:
    if why is not None:
        yield f"{test}: {why}"
    for who, (outcome, reason) in cells.items():
        if outcome != "passed":
            yield f"{test}: {who} {outcome}: {reason}"


def main(argv: list[str]) -> int:
    """Prints the table of a folder with one folder for each kind of wrapper."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--world-size", type=int, default=2)
    given = parser.parse_args(argv)
    kinds = [who for who in ("ours", "bundled") if (given.folder / who).is_dir()]
    lines, good = table({who: given.folder / who for who in kinds}, given.world_size)
    print("\n".join(lines))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
