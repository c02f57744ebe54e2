from __future__ import annotations

import functools
import os
import subprocess
from collections.abc import Iterator, Sequence
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

import pytest

from tests.lib import strays
from tests.lib.again import is_again

MARK = pytest.StashKey[str]()
LEFT = pytest.StashKey[list[str]]()
GUARD = pytest.StashKey[subprocess.Popen[bytes]]()
GRACE_S = 5.0
"""For processes that are about to end when the last test has."""
READS_RUNS = "tests/scripts/"
"""A folder whose files read the same runs."""
ON_GPUS = (
    "tests/gpu",
    "tests/integration/test_fsdp2_tests.py",
    "tests/integration/test_peer_tests.py",
)
"""Tests that use GPUs where there are some. All others are written for CPUs."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full", action="store_true", help="also run the tests that are marked `full`"
    )
    parser.addoption(
        "--again", action="store_true", help="run what differs between releases of megatron-core"
    )
    parser.addoption(
        "--skips",
        type=Path,
        metavar="FILE",
        help="write there which tests are skipped; with --again, run those of it too",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked `full` are left out unless asked for with --full or -m; with --again those that
    say the same with every release."""
    every = config.getoption("--full") or config.getoption("-m")
    again = config.getoption("--again")
    skips = config.getoption("--skips")
    skipped = skips.read_text().splitlines() if again and skips else []
    chosen: dict[bool, list[pytest.Item]] = {True: [], False: []}
    for item in items:
        runs = every or not item.get_closest_marker("full")
        chosen[bool(runs and (not again or is_again(item.nodeid, skipped)))].append(item)
    if chosen[False]:
        config.hook.pytest_deselected(items=chosen[False])
        items[:] = chosen[True]


@pytest.fixture(scope="session")
def shared_ranks(request: pytest.FixtureRequest) -> Any:
    """Outcomes of the session's tests on ranks. Here and in no other conftest: each would have a
    fixture of its own, and run all of them once more."""
    from tests.lib.ranks.shared_ranks import SharedRanks

    return SharedRanks(request.session.items)


@pytest.fixture
def two_ranks() -> Iterator[None]:
    """Two ranks, of which only this one exists."""
    from tests.lib.engine.pretended import pretended_world

    with pretended_world(2):
        yield


@pytest.fixture
def alone() -> Iterator[None]:
    """A gloo world of this process alone."""
    from tests.lib.ranks.one_rank import world_of_one

    with world_of_one():
        yield


@pytest.fixture
def one_rank(alone: None) -> Iterator[None]:
    """The same, which stands for one of many."""
    from tests.lib.ranks.one_rank import as_one_of_many

    with as_one_of_many():
        yield


@functools.cache
def share_of(root: Path, file: str) -> str:
    """The name of what one process of `-n` is given with a file: all files that share ranks
    (`@on_ranks`: a process runs all that it knows of), or runs; or only the file."""
    if file.startswith(READS_RUNS):
        return READS_RUNS
    if "import on_ranks" in (root / file).read_text():
        return "on ranks"
    return file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `-n 2` a process is given a file at a time, or files that share something."""
    from xdist.scheduler import LoadFileScheduling

    class Files(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return share_of(config.rootpath, super()._split_scope(nodeid))

    return Files(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """The run reports what a process of `-n` left behind."""
    left = getattr(node, "workeroutput", {}).get("left", [])
    node.config.stash.setdefault(LEFT, []).extend(left)


def are_on_gpus(paths: Sequence[str], root: Path) -> bool:
    """True if all these arguments of a run are tests that use GPUs."""
    files = [Path(os.path.abspath(path.partition("::")[0])) for path in paths]
    places = [root / place for place in ON_GPUS]
    return all(any(file.is_relative_to(place) for place in places) for file in files)


def pytest_configure(config: pytest.Config) -> None:
    # CPU mode refuses to start beside a GPU, and ranks of gloo would take it for theirs.
    if not are_on_gpus(config.args, config.rootpath):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    config.stash[MARK], os.environ[strays.VARIABLE] = strays.new_mark()
    config.stash[GUARD] = strays.guard(config.stash[MARK])


def _is_of_the_interpreter(pid: int, words: str) -> bool:
    """Ends with this process: what `multiprocessing` and torch keep for a later call."""
    own = (forkserver._forkserver._forkserver_pid, resource_tracker._resource_tracker._pid)
    return pid in own or "torch/_inductor/compile_worker" in words


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """No process outlives the tests: the run fails, and says which did."""
    config = session.config
    with config.stash[GUARD] as guard:
        guard.kill()
    left = strays.left_behind(config.stash[MARK], GRACE_S, _is_of_the_interpreter)
    told = config.stash.setdefault(LEFT, [])
    told += [f"{pid}: {words}" for pid, words in left.items()]
    strays.end(left)
    if hasattr(config, "workeroutput"):
        config.workeroutput["left"] = told
        forkserver._forkserver._stop()  # or the run that waits for this process takes it for one
    if told and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    config = terminalreporter.config
    if config.getoption("--skips") and not config.getoption("--again"):
        skipped = {report.nodeid for report in terminalreporter.stats.get("skipped", [])}
        config.getoption("--skips").write_text("\n".join(sorted(skipped)))
    left = config.stash.get(LEFT, [])
    if left:
        terminalreporter.section("processes that outlive the tests", red=True)
        terminalreporter.write_line("\n".join(left))
