"""No process outlives a run of tests, however the run ends; and a run that leaves one behind
fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lib import strays

CHECKS = ()  # of tests/conftest.py

ROOT = Path(__file__).resolve().parents[2]


def begun(
    folder: Path, text: str, conftest: str = "", *options: str
) -> tuple[subprocess.Popen[str], str]:
    """A run of tests that its mark identifies, and its kind."""
    (folder / "test_it.py").write_text(text)
    (folder / "conftest.py").write_text(conftest)
    (folder / "pytest.ini").write_text("[pytest]\n")
    mark, value = strays.new_mark()
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, "test_it.py"],
        cwd=folder,
        env={**os.environ, strays.VARIABLE: value, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return process, mark


ORPHAN = """
import os, signal
from multiprocessing import get_context
if __name__ == "__main__":
    manager = get_context("spawn").Manager()
    os.kill(os.getpid(), signal.SIGKILL)
"""
IS_ENDED = """
import os, pathlib, subprocess, sys, time
def test_it_is_ended():
    middle = "import subprocess; subprocess.Popen(['sleep', '600'], start_new_session=True)"
    subprocess.run([sys.executable, "-c", middle], check=True)
    assert subprocess.run([sys.executable, "orphan.py"]).returncode == -9
    pathlib.Path("begun").touch()
    ENDS
"""
"""Leaves a process in a session of its own, and one of spawn_main, without their parents."""


@pytest.mark.parametrize("ends", ["time.sleep(600)", "os._exit(9)"])
def test_orphans_of_a_run_that_is_ended_in_a_test_end_with_it(tmp_path: Path, ends: str) -> None:
    """Killed from outside, or without a session's end, as a time limit of pytest-timeout ends."""
    (tmp_path / "orphan.py").write_text(ORPHAN)
    text = IS_ENDED.replace("ENDS", ends)
    process, mark = begun(tmp_path, text, "from tests.conftest import *\n")
    try:
        strays.wait_for((tmp_path / "begun").exists)
        if "sleep" in ends:
            words = " ".join(strays.marked(mark).values())
            assert "sleep 600" in words, words
            assert "spawn_main" in words, words
            process.send_signal(signal.SIGKILL)
        assert process.wait(60) != 0
        strays.wait_for(lambda: not strays.marked(mark), 10.0)
    finally:
        strays.end_all(mark)


LEAVES = """
import os, subprocess, sys
def test_it_passes():
    subprocess.Popen(["sleep", "601"], start_new_session=True)
    middle = "import subprocess; subprocess.Popen(['sleep', '602'], start_new_session=True)"
    subprocess.run([sys.executable, "-c", middle], check=True)
"""


@pytest.mark.parametrize("options", [(), ("-n", "1")], ids=["one process", "a process of -n"])
def test_a_run_that_leaves_processes_behind_fails_and_names_them(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    conftest = "import tests.conftest\ntests.conftest.GRACE_S = 0.5\nfrom tests.conftest import *\n"
    process, mark = begun(tmp_path, LEAVES, conftest, *options)
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 1, output
    assert "1 passed" in output, output
    told = output.partition("processes that outlive the tests")[2]
    for seconds in (601, 602):
        assert f": sleep {seconds}\n" in told, output
    assert not strays.marked(mark), "they are ended"
    process, _ = begun(tmp_path, "def test_it_passes(): pass\n", conftest, *options)
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 0, output
    assert "outlive" not in output, output


def test_a_process_whose_parent_was_killed_is_an_orphan() -> None:
    mark, value = strays.new_mark()
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    parent = subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, strays.VARIABLE: value},
        stdin=subprocess.PIPE,
    )
    try:
        strays.wait_for(lambda: len(strays.marked(mark)) == 2)
        assert strays.orphans(mark) == []
        parent.kill()
        parent.wait()
        [child] = strays.orphans(mark)
        strays.end([child])
        strays.wait_for(lambda: not strays.marked(mark), 10.0)
    finally:
        strays.end_all(mark)
