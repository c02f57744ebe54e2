"""The runner of the tests for GPUs, on tests that need none: what it notes, where it goes on."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.gpu import __main__ as gpu
from tests.gpu import gpu_ranks, journal, shards
from tests.gpu.shards import FAILED, HUNG, MATRIX, PASSED, SKIPPED, UNREACHED, Known, Shard

pytestmark = pytest.mark.once


def lines(*of: tuple[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for test, said in of:
        more = {"outcome": said, "seconds": 2.0, "why": "w"} if said in (PASSED, FAILED) else said
        found.append({"test": f"tests/gpu/{test}", **more})
    return found


def test_what_did_not_end_is_not_reached_once_and_hung_then() -> None:
    begun = {"begun": True}
    found = {"test_gpu_a": Shard("test_gpu_a"), "test_gpu_b": Shard("test_gpu_b")}
    told = lines(
        ("test_gpu_a.py::x", {}), ("test_gpu_a.py::y", {}), ("test_gpu_a.py::z", {}),
        ("test_gpu_a.py::x", begun), ("test_gpu_a.py::y", begun), ("test_gpu_a.py::y", FAILED),
    )  # fmt: skip
    shards.learn(found, told)
    a, b = found.values()
    assert [known.state for known in a.tests.values()] == [UNREACHED, FAILED, UNREACHED]
    assert [name[-1] for name in a.unreached] == ["z", "x"], "what was begun already is last"
    assert (a.is_over, b.is_over, b.counts()) == (False, False, {UNREACHED: 1})
    shards.learn(found, lines(("test_gpu_a.py::x", begun), ("test_gpu_a.py::z", PASSED)))
    assert a.counts() == {FAILED: 1, HUNG: 1, PASSED: 1} and a.is_over
    assert not shards.is_clean([a]) and not shards.is_clean([b])
    assert "HUNG tests/gpu/test_gpu_a.py::x" in shards.table(found.values())
    shards.learn(found, [{"shard": "test_gpu_a", "again": True}])
    assert a.counts() == {UNREACHED: 2, PASSED: 1}


def test_a_file_whose_process_ends_without_a_word_is_begun_twice() -> None:
    found = {"test_gpu_a": Shard("test_gpu_a")}
    for count in (1, 2):
        shards.learn(found, [{"shard": "test_gpu_a", "ended": 1, "idle": True}])
        assert found["test_gpu_a"].is_over == (count == 2)
    assert found["test_gpu_a"].counts() == {HUNG: 1}


def test_quick_files_are_first_and_share_the_device_as_far_as_it_goes() -> None:
    quick, slow = Shard("test_gpu_streams"), Shard("test_gpu_activation_offload")
    alone, over = Shard("test_gpu_meta"), Shard("test_gpu_te", {"x": Known(PASSED)}, True)
    left = shards.in_order([alone, slow, over, quick])
    assert left == [quick, slow, alone]
    assert shards.next_of(left, [], 4, 130) is quick
    assert shards.next_of([slow, alone], [quick], 4, 130) is slow
    assert shards.next_of([slow, alone], [quick], 4, 70) is None
    assert shards.next_of([alone], [quick], 4, 130) is None
    assert shards.next_of([alone], [], 4, 130) is alone
    assert shards.next_of([quick], [alone], 4, 130) is None
    assert shards.next_of([slow], [quick], 1, 130) is None


def test_what_lacked_memory_beside_others_runs_once_more_alone() -> None:
    found = {"test_gpu_a": Shard("test_gpu_a")}
    lacked = {"outcome": FAILED, "seconds": 1.0, "why": "w", "lacked_memory": True}
    told = [
        *lines(("test_gpu_a.py::x", lacked), ("test_gpu_a.py::y", FAILED)),
        {"shard": "test_gpu_a", "ended": 1, "idle": False, "beside": 2, "gib": 30},
    ]
    shards.learn(found, told)
    [shard] = found.values()
    assert [known.state for known in shard.tests.values()] == [UNREACHED, FAILED]
    assert shard.gib == shards.ALONE and not shard.is_over
    shards.learn(found, [*told[:1], {**told[-1], "beside": 0}])
    assert shard.counts() == {FAILED: 2} and shard.is_over


def test_memory_that_was_measured_counts_if_it_is_more() -> None:
    found = {"test_gpu_streams": Shard("test_gpu_streams")}
    for gib, expected in ((1, shards.GIB), (90, 90), (50, 90)):
        shards.learn(found, [{"shard": "test_gpu_streams", "ended": 0, "idle": False, "gib": gib}])
        assert found["test_gpu_streams"].gib == expected


def test_every_name_of_a_table_is_a_file() -> None:
    assert {*shards.MEMORY, *shards.SECONDS, *shards.LIMITS} <= shards.all_shards().keys()


TESTS = """
import time, pytest, pathlib
HERE = pathlib.Path(__file__).parent
def test_passes(): pass
def test_fails(): assert 1 == 2, "one is not two"
@pytest.mark.skip(reason="no reason")
def test_skipped(): pass
def test_hangs():
    (HERE / "pid").write_text(str(__import__("os").getpid()))
    time.sleep(HANGS)
def test_behind(): pass
"""


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Of a suite of one file, in which a test hangs."""
    folder = tmp_path / "tests" / "gpu"
    folder.mkdir(parents=True)
    (folder / "test_gpu_a.py").write_text(TESTS.replace("HANGS", "600"))
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    monkeypatch.setattr(shards, "ROOT", tmp_path)
    monkeypatch.setattr(gpu, "matrix_lines", lambda options: [])
    monkeypatch.setattr(gpu, "LEAST_S", 0.5)
    command = gpu.command_of

    def without_full(*given: Any) -> list[str]:
        return [word for word in command(*given) if word != "--full"]

    monkeypatch.setattr(gpu, "command_of", without_full)
    monkeypatch.setenv("PYTHONPATH", str(journal_root()))
    return lambda *more: gpu.parse(
        ["--results", str(tmp_path / "r.jsonl"), "--only", "test_gpu", *more]
    )


def journal_root() -> Path:
    return Path(journal.__file__).resolve().parents[2]


def test_a_call_goes_on_where_one_before_was_ended(options: Any, tmp_path: Path) -> None:
    one = options("--test-limit", "2.5")
    gpu.run(one)
    found = gpu.state(one)["test_gpu_a"]
    states = {name.rpartition("::")[2]: known.state for name, known in found.tests.items()}
    assert states == {
        "test_passes": PASSED, "test_fails": FAILED, "test_skipped": SKIPPED, "test_hangs": HUNG,
        "test_behind": PASSED,
    }  # fmt: skip
    told = shards.table([found])
    assert "test_fails: AssertionError: one is not two" in told
    assert "skipped   1  test_gpu_a: no reason" in told
    assert "one is not two" in (tmp_path / "failures.txt").read_text()
    pid = (tmp_path / "tests" / "gpu" / "pid").read_text()
    assert not Path(f"/proc/{pid}").exists()
    # What hangs no longer, by the next call.
    (tmp_path / "tests" / "gpu" / "test_gpu_a.py").write_text(TESTS.replace("HANGS", "0"))
    assert gpu.main(["--results", str(one.results), "--only", "test_gpu", "--again"]) == 1
    assert gpu.state(one)["test_gpu_a"].counts() == {PASSED: 3, FAILED: 1, SKIPPED: 1}


def test_all_that_runs_is_ended_before_the_time_is(options: Any) -> None:
    one = options("--time-limit", str(gpu.ENDING_S + 4))
    started = time.monotonic()
    gpu.run(one)
    assert time.monotonic() - started < gpu.ENDING_S + 4
    assert gpu.state(one)["test_gpu_a"].counts()[UNREACHED] >= 1


# The checks of a file.


def says(rank: int, world: int, what: str) -> str:
    if what == "raises" and rank == 1:
        raise ValueError("it raised")
    if what == "leaves the other":
        if rank == 1:
            raise ValueError("it left")
        time.sleep(600)
    if what == "ends":
        os._exit(3)
    if what == "hangs":
        time.sleep(600)
    return what


def test_a_check_that_ends_its_processes_loses_only_itself() -> None:
    words = ("first", "raises", "ends", "behind")
    checks = {word: gpu_ranks.Check(says, (word,)) for word in words}
    outcomes = gpu_ranks.Outcomes(checks, timeout_s=100.0, backend="gloo")
    outcomes.expect("first")
    with pytest.raises(AssertionError, match="(?s)rank 1: .*it raised"):
        outcomes.expect("raises")
    with pytest.raises(AssertionError, match="ends was not finished:\n"):
        outcomes.expect("ends")
    outcomes.expect("behind")


def test_a_rank_that_raises_ends_the_check_that_the_other_is_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpu_ranks, "BEHIND_S", 1)
    words = ("first", "leaves the other", "behind")
    checks = {word: gpu_ranks.Check(says, (word,)) for word in words}
    outcomes = gpu_ranks.Outcomes(checks, timeout_s=400.0, backend="gloo")
    with pytest.raises(AssertionError, match=r"(?s)rank 1: .*it left\s+the other rank stayed"):
        outcomes.expect("leaves the other")
    outcomes.expect("behind")


def test_an_outcome_is_there_when_its_check_has_ended_and_the_rest_can_be_closed() -> None:
    checks = {word: gpu_ranks.Check(says, (word,)) for word in ("first", "hangs", "behind")}
    outcomes = gpu_ranks.Outcomes(checks, timeout_s=400.0, backend="gloo")
    outcomes.expect("first")
    outcomes.close()
    for word in ("hangs", "behind"):
        with pytest.raises(AssertionError, match=f"{word} was not finished"):
            outcomes.expect(word)


def test_the_cells_of_the_matrix_are_a_part(tmp_path: Path) -> None:
    found = gpu.state(gpu.parse(["--results", str(tmp_path / "r.jsonl"), "--only", MATRIX]))
    cells = found[MATRIX].tests
    assert len(cells) > 8 and all("graph=on" in name for name in cells)
    command = gpu.command_of(found[MATRIX], gpu.parse([]), 100.0)
    assert command[:4] == [sys.executable, "-m", "tests.matrix", "run"]
