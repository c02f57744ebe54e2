"""The table of scripts/peer_tests.sh: a test has passed if all ranks came to its end and say so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration import peer_tests


def _write(folder: Path, rank: int, *rows: tuple[str, str, str]) -> None:
    folder.mkdir(exist_ok=True, parents=True)
    lines = [
        json.dumps({"test": test, "when": "call", "outcome": outcome, "reason": reason})
        for test, outcome, reason in rows
    ]
    (folder / f"function.{rank}.jsonl").write_text("\n".join(lines) + "\n")


def test_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours, bundled = tmp_path / "ours", tmp_path / "bundled"
    eight = "C::test_fsdp_with_process_groups[8]"
    for folder in (ours, bundled):
        rows = [("C::good", "passed", ""), (eight, "failed", "RuntimeError: Grid shape [8]")]
        _write(folder, 0, *rows, ("C::hangs", "passed", ""))
        _write(folder, 1, *rows)
    assert peer_tests.main([str(tmp_path), "--world-size", "2"]) == 1, "one rank never came back"
    text = capsys.readouterr().out
    assert text.splitlines()[0].split() == ["test", "ours", "bundled"]
    assert f"{eight}: it makes a grid of 8 ranks" in text
    assert "C::hangs: ours not finished: only ranks 0 came to its end" in text
    _write(ours, 1, *rows, ("C::hangs", "passed", ""))
    assert peer_tests.main([str(tmp_path), "--world-size", "2"]) == 0, "what cannot pass need not"


def test_nothing_ran_is_no_success(tmp_path: Path) -> None:
    assert peer_tests.main([str(tmp_path)]) == 1


def test_one_rank_that_failed_decides() -> None:
    row = {"when": "call", "outcome": "passed", "reason": ""}
    bad = {**row, "outcome": "failed", "reason": "assert False"}
    found = peer_tests.verdict({"0": [row], "1": [bad]}, 2)
    assert found == ("failed", "rank 1, call: assert False")


def test_with_eight_ranks_those_for_two_cannot_run() -> None:
    assert peer_tests.expected_failure("test_fsdp_with_process_groups[8]", 8) is None
    assert "2 ranks" in peer_tests.expected_failure("test_fsdp_with_process_groups[2]", 8)
    assert peer_tests.expected_failure("test_compatible_with_nd_parallel[x]", 2) is None
