"""The runner of the tests for GPUs, on tests that need none: what it notes, where it goes on."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import are_on_gpus
from tests.gpu import __main__ as gpu
from tests.lib.gpu import gpu_ranks, journal, shards
from tests.lib.gpu.shards import FAILED, HUNG, PASSED, SKIPPED

CHECKS = ()  # of tests/gpu
ROOT = Path(__file__).parents[2]

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
    monkeypatch.setattr(gpu, "LEAST_S", 0.5)
    command = gpu.command_of

    monkeypatch.setattr(
        gpu, "command_of", lambda *given: [word for word in command(*given) if word != "--full"]
    )
    monkeypatch.setenv("PYTHONPATH", str(Path(journal.__file__).resolve().parents[3]))
    return lambda *more: gpu.parse(
        ["--results", str(tmp_path / "r.jsonl"), "--only", "test_gpu", *more]
    )


def test_a_call_goes_on_where_one_before_was_ended(options: Any, tmp_path: Path) -> None:
    one = options("--test-limit", "2.5")
    gpu.run(one)
    found = gpu.state(one)["test_gpu_a"]
    states = {name.rpartition("::")[2]: known.state for name, known in found.tests.items()}
    assert states == {
        "test_passes": PASSED,
        "test_fails": FAILED,
        "test_skipped": SKIPPED,
        "test_hangs": HUNG,
        "test_behind": PASSED,
    }
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
    if what == "fills the device":
        gpu_ranks.used_bytes = lambda: gpu_ranks.CROWDED_BYTES + 1
    assert what != "behind" or gpu_ranks.used_bytes() == 0, "in new processes"
    return what


@pytest.mark.parametrize(
    ("words", "errors"),
    [
        # A check that ends its processes loses only itself.
        (
            ("first", "raises", "ends", "behind"),
            {"raises": "(?s)rank 1: .*it raised", "ends": "ends was not finished:\n"},
        ),
        # A rank that raises ends the check that the other is in.
        (
            ("first", "leaves the other", "behind"),
            {"leaves the other": r"(?s)rank 1: .*it left\s+the other rank stayed"},
        ),
        # Ranks that hold too much memory make way for new ones.
        (("fills the device", "behind"), {}),
    ],
    ids=["ends", "leaves", "fills"],
)
def test_a_check_that_fails_loses_only_itself(
    monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], errors: dict[str, str]
) -> None:
    monkeypatch.setattr(gpu_ranks, "BEHIND_S", 1)
    checks = {word: gpu_ranks.Check(says, (word,)) for word in words}
    outcomes = gpu_ranks.Outcomes(checks, timeout_s=400.0, backend="gloo")
    for word in words:
        if word in errors:
            with pytest.raises(AssertionError, match=errors[word]):
                outcomes.expect(word)
        else:
            outcomes.expect(word)


def test_gpus_are_hidden_from_tests_that_are_for_cpus() -> None:
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


@pytest.mark.parametrize(
    ("paths", "on_gpus"),
    [
        (("tests",), False),
        (("tests/core", "tests/gpu"), False),
        (("tests/gpu",), True),
        ((f"{ROOT}/tests/gpu/test_gpu_waits.py::test_a_name[one::two]",), True),
        (("tests/integration/test_peer_tests.py", "tests/gpu"), True),
        (("tests/integration/test_megatron_lm.py",), False),
    ],
)
def test_gpus_are_visible_to_tests_that_use_them(
    paths: tuple[str, ...], on_gpus: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert are_on_gpus(paths, ROOT) is on_gpus
