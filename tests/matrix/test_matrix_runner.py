"""The runner of the matrix: what becomes of cells that fail, raise, hang or take a rank with them,
and of those that have been run before. Nothing is trained here."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from tests.distributed import shared_ranks
from tests.matrix import results
from tests.matrix import run as run_module
from tests.matrix.results import FAILED, PASSED, RAISED, Setting, code_digest, verdict
from tests.matrix.run import CellJob, run
from tests.matrix.table import cell_named, name_of
from tests.matrix.training import Finding

BOUND = 1e-3
BEHAVIOR: Mapping[str, str] = {
    "cpu strategy=optim": "is off on the last rank",
    "cpu strategy=optim_grads": "raises on all ranks",
    "cpu strategy=no_shard": "raises on the last rank",
    "cpu precision=bf16": "ends a rank",
    "cpu precision=fp16": "hangs",
    "cpu fusion=on": "is not a number",
    "cpu overlap=off": "passes",
}
"""Name of a cell -> what the check below does with it. A rank that raises alone leaves the other in
a collective."""
STATUS = {
    "passes": PASSED, "is off on the last rank": FAILED, "is not a number": FAILED,
}  # fmt: skip
SETTING = Setting("tiny", "cpu", poison=False)


def _check(cell: Any, width: str) -> dict[str, Finding]:
    behavior, last = BEHAVIOR[name_of(cell)], dist.get_rank() == dist.get_world_size() - 1
    error = 0.0
    if behavior == "raises on all ranks" or (behavior == "raises on the last rank" and last):
        raise RuntimeError("as it should")
    if behavior == "ends a rank" and last:
        os._exit(3)
    if behavior == "hangs":
        time.sleep(1000)
    if behavior == "is off on the last rank" and last:
        error = 0.5
    if behavior == "is not a number" and last:
        error = float("nan")
    dist.barrier()
    return {"gradient": Finding(error, BOUND, "a weight")}


def _outcomes(behaviors: set[str], folder: Path) -> dict[str, results.Result]:
    """By behavior, of the cells that behave so and one that passes, which is the last. Each has
    one result, and a second run finds nothing to do."""
    cells = [cell_named(name) for name, does in BEHAVIOR.items() if does in behaviors]
    cells.append(cell_named("cpu overlap=off"))
    path = folder / "results.jsonl"
    found = run(cells, SETTING, path, slowest_s=10.0, check=_check)
    assert [result.cell for result in found] == [name_of(cell) for cell in cells]
    assert found[-1].status == PASSED
    assert run(cells, SETTING, path, check=_check) == found
    for result in found:
        assert result.status == STATUS.get(BEHAVIOR[result.cell], RAISED), result
    return {BEHAVIOR[result.cell]: result for result in found}


def test_a_cell_that_fails_or_raises_or_ends_a_rank_ends_only_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = _outcomes(
        {"is off on the last rank", "is not a number", "raises on all ranks", "ends a rank"},
        tmp_path,
    )
    said = {behavior: "\n".join(result.problems) for behavior, result in found.items()}
    assert "off by 5.00e-01, 1.00e-03 allowed (rank 1: a weight)" in said["is off on the last rank"]
    assert "gradient: off by nan" in said["is not a number"]
    assert "RuntimeError: as it should (matrix/test_matrix_runner" in said["raises on all ranks"]
    assert said["ends a rank"]
    assert "1 passed, 2 failed, 2 raised, 0 not run, of 5 cells" in capsys.readouterr().out


@pytest.mark.full
def test_a_cell_that_hangs_ends_only_itself(tmp_path: Path) -> None:
    found = _outcomes({"raises on the last rank", "hangs"}, tmp_path)
    said = {behavior: "\n".join(result.problems) for behavior, result in found.items()}
    assert "rank 0 did not end" in said["hangs"] and "_check" in said["hangs"]
    alone = said["raises on the last rank"]
    assert "RuntimeError: as it should (matrix/test_matrix_runner.py" in alone


def test_processes_that_never_begin_a_cell_are_an_error(tmp_path: Path, monkeypatch: Any) -> None:
    """And no cell is blamed for it."""
    monkeypatch.setattr(shared_ranks, "_run_on_rank", _does_not_start)
    path = tmp_path / "results.jsonl"
    with pytest.raises(RuntimeError, match="no job was begun"):
        run([cell_named("cpu")], SETTING, path, check=_check)
    assert results.read(path) == []


def _does_not_start(rank: int, world: int, *unused: Any) -> str:
    raise OSError("address already in use")


def test_no_cell_is_begun_when_the_time_is_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "results.jsonl"
    assert run([cell_named("cpu")], SETTING, path, seconds=0.0, check=_check) == []
    assert "0 passed, 0 failed, 0 raised, 1 not run, of 1 cells" in capsys.readouterr().out


def test_another_setting_and_other_code_are_other_results(monkeypatch: Any) -> None:
    cell = cell_named("cpu")
    settings = [
        SETTING, Setting("small", "cpu", False), Setting("tiny", "cuda", False),
        Setting("tiny", "cpu", True),
    ]  # fmt: skip
    digests = {setting.digest(cell) for setting in settings}
    assert len(digests) == len(settings)
    before = code_digest()
    code_digest.cache_clear()
    monkeypatch.setattr(results, "SOURCES", results.SOURCES[:1])
    assert code_digest() != before
    code_digest.cache_clear()


def test_the_worst_rank_tells_the_verdict() -> None:
    ranks = [{"a": (1.0, 2.0, "x"), "b": (3.0, 2.0, "y")}, {"a": (1.5, 2.0, "z")}, {}]
    found = verdict(ranks)
    assert found["status"] == FAILED
    assert found["measures"] == {"a": [1.5, 2.0, "rank 1: z"], "b": [3.0, 2.0, "rank 0: y"]}
    assert found["problems"] == ["b: off by 3.00e+00, 2.00e+00 allowed (rank 0: y)"]
    assert verdict([{"a": (1.0, 2.0, "x")}])["status"] == PASSED


def test_a_line_that_was_cut_short_is_no_result(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    assert results.read(path) == []
    one = results.Result("cpu", "0", "tiny", False, PASSED, 1.0)
    results.append(path, one)
    with path.open("a") as file:
        file.write('{"cell": "cpu tp=2", "dig')
    assert results.read(path) == [one]


@dataclass(frozen=True)
class InALittleMemory(CellJob):
    """A cell whose processes hold too much afterwards."""

    def run(self, rank: int, root: Path) -> None:
        with mock.patch.object(run_module, "_is_crowded", lambda: True):
            super().run(rank, root)


def test_processes_that_hold_too_much_memory_make_way_for_new_ones(
    tmp_path: Path, monkeypatch: Any
) -> None:
    """Every cell has its outcome, whichever processes run it."""
    monkeypatch.setattr(run_module, "CellJob", InALittleMemory)
    cells = [cell_named("cpu overlap=off"), cell_named("cpu overlap=off microbatches=3")]
    found = run(cells, SETTING, tmp_path / "results.jsonl", check=_pid)
    assert [result.status for result in found] == [PASSED, PASSED]
    first, second = ({m[2] for m in result.measures.values()} for result in found)
    assert first != second, "the second cell has processes of its own"


def _pid(cell: Any, width: str) -> dict[str, Finding]:
    return {"gradient": Finding(0.0, BOUND, str(os.getpid()))}
