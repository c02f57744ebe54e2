"""Saves of one process into one root, of any kind and in any order: each leaves the others alone,
and errors name the true cause."""

from __future__ import annotations

import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_fsdp_adapter.checkpoint import (
    AsyncSaver,
    CheckpointError,
    folders,
    load_checkpoint,
    publishing,
    running,
    save_checkpoint,
    storage,
)
from megatron_fsdp_adapter.megatron.compat.table import SAVES
from megatron_fsdp_adapter.tools.cli import verify
from tests.lib.checkpoint.checkpoint_cases import names
from tests.lib.checkpoint.megatron_loop import NAMES, Loop
from tests.lib.megatron.stand_ins import stand_ins
from tests.lib.ranks.launch import run_ranks

CHECKS = (
    "checkpoint/running.py",
    "checkpoint/publishing.py",
    "checkpoint/asynchronous.py",
    "checkpoint/coordination.py",
    "megatron/checkpoint/megatron_saves.py",
)

HELD_S = 0.5
NO_SPACE = OSError(28, "No space left on device")


def _state(rank: int, number: float) -> dict[str, Any]:
    return {"model": {f"w{rank}": torch.full((4,), number)}, "number": number}


def _check(root: Path, rank: int, iteration: int, number: float) -> None:
    _, loaded = load_checkpoint(root, _state(rank, 0.0), iteration=iteration, **_ALL)
    assert loaded["number"] == number
    if rank == 0:
        assert verify.examine(folders.final_folder(root, iteration))["intact"]
    dist.barrier()


_ALL: dict[str, Any] = {"ignore_unexpected": ("model.",)}


@contextmanager
def _slow_threads() -> Iterator[None]:
    """Background saves take `HELD_S` longer than plain ones."""
    original = storage._write_file

    def write(*args: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            threading.Event().wait(HELD_S)
        return original(*args)

    with mock.patch.object(storage, "_write_file", write):
        yield


def _by_another_saver(root: Path, iteration: int, state: dict[str, Any], loop: Loop) -> None:
    with AsyncSaver() as saver:
        saver.save(root, iteration, state)


def _plain(root: Path, iteration: int, state: dict[str, Any], loop: Loop) -> None:
    save_checkpoint(root, iteration, state)


def _by_megatron(root: Path, iteration: int, state: dict[str, Any], loop: Loop) -> None:
    checkpoint = loop.saving.torch.distributed.checkpoint
    folder = folders.final_folder(root, iteration)
    checkpoint.save(state, storage_writer=checkpoint.FileSystemWriter(str(folder)))
    if dist.get_rank() == 0:
        loop._track(iteration)
    dist.barrier()


NEXT: tuple[tuple[Callable[..., None], int], ...] = (
    (_plain, 11),
    (_plain, 10),
    (_plain, 9),
    (_by_another_saver, 11),
    (_by_megatron, 11),
)
"""Ways to save while iteration 10 is saved in the background, and the iteration."""


def _during_a_background_save(rank: int, size: int, work: str) -> None:
    with stand_ins(NAMES, SAVES) as modules, _slow_threads():
        for save, iteration in NEXT:
            root = Path(work, f"{save.__name__}{iteration}")
            with AsyncSaver() as saver:
                saver.save(root, 10, _state(rank, 10.0))
                save(root, iteration, _state(rank, 5.0), Loop(root, modules))
            assert folders.read_tracker(root) == iteration
            assert folders.complete_iterations(root) == tuple(sorted({10, iteration}))
            _check(root, rank, 10, 5.0 if iteration == 10 else 10.0)
            _check(root, rank, iteration, 5.0)
        _confirmed_late(rank, Path(work, "late"), Loop(Path(work, "late"), modules))


def _confirmed_late(rank: int, root: Path, loop: Loop) -> None:
    """Megatron writes the tracker of a background save when its loop asks again. A plain save of a
    later iteration is the newest all the same, and is not deleted as the one before."""
    loop.save(10, _state(rank, 10.0))
    save_checkpoint(root, 11, _state(rank, 11.0))
    loop.queue.maybe_finalize_async_calls(blocking=True)
    dist.barrier()
    assert folders.read_tracker(root) == 11
    assert folders.complete_iterations(root) == (10, 11)
    loop.save(12, _state(rank, 12.0))
    loop.queue.maybe_finalize_async_calls(blocking=True)
    dist.barrier()
    assert folders.read_tracker(root) == 12


def test_a_save_during_a_background_save_waits_for_it(tmp_path: Path) -> None:
    """Both are there, and the one that was begun later is the newest."""
    run_ranks(_during_a_background_save, 2, str(tmp_path))


def test_other_roots_are_not_waited_for(one_rank: None, tmp_path: Path) -> None:
    reached, opened = threading.Event(), threading.Event()
    original = storage._write_file

    def write(path: Path, *args: Any) -> Any:
        if tmp_path / "a" in path.parents:
            reached.set()
            assert opened.wait(60)
        return original(path, *args)

    with mock.patch.object(storage, "_write_file", write), AsyncSaver() as saver:
        saver.save(tmp_path / "a", 1, _state(0, 1.0))
        assert reached.wait(60)
        save_checkpoint(tmp_path / "b", 1, _state(0, 1.0))
        assert saver.busy
        opened.set()
    assert folders.complete_iterations(tmp_path / "a") == (1,)


def _interrupted_by(step: Callable[[], None]) -> Any:
    """Patches the writing of data: `step` runs in the middle of the first save, as a handler of a
    signal would."""
    original = storage._write_file
    steps = [step]

    def write(*args: Any) -> Any:
        if steps:
            steps.pop()()
        return original(*args)

    return mock.patch.object(storage, "_write_file", write)


@pytest.mark.parametrize("inner", [11, 10])
def test_a_save_in_a_signal_handler(one_rank: None, tmp_path: Path, inner: int) -> None:
    """It finds a plain save of its own thread, which cannot go on meanwhile."""

    def handler() -> None:
        save_checkpoint(tmp_path, inner, _state(0, 7.0), keep_last=3)

    with _interrupted_by(handler):
        save_checkpoint(tmp_path, 10, _state(0, 10.0))
    assert names(tmp_path) == sorted({f"iter_{i:07d}" for i in (10, inner)}) + [folders.TRACKER]
    assert folders.read_tracker(tmp_path) == inner


@pytest.mark.parametrize(("owner", "at"), [(os, "replace"), (running, "wait")])
def test_a_handler_that_saves_at_the_end_or_the_beginning_of_another_save(
    one_rank: None, tmp_path: Path, owner: Any, at: str
) -> None:
    """Its save was begun later, so it is the newest."""
    original = getattr(owner, at)
    saves = [11]

    def call(*args: Any) -> Any:
        if saves and (at == "wait" or Path(args[1]).name == folders.TRACKER):
            save_checkpoint(tmp_path, saves.pop(), _state(0, 7.0))
        return original(*args)

    with mock.patch.object(owner, at, call):
        save_checkpoint(tmp_path, 10, _state(0, 10.0))
    assert folders.read_tracker(tmp_path) == 11
    assert folders.complete_iterations(tmp_path) == (10, 11)


@pytest.mark.parametrize("ends", [SystemExit, KeyboardInterrupt])
@pytest.mark.parametrize("at", ["_write_file", "write"])
def test_a_handler_that_ends_the_program_ends_it(
    one_rank: None, tmp_path: Path, ends: type[BaseException], at: str
) -> None:
    """torch wraps what is raised in a save as an error of it."""
    save_checkpoint(tmp_path, 1, _state(0, 1.0))
    fails = mock.Mock(side_effect=ends)
    owner = storage if at == "_write_file" else storage.digests.DigestingFile
    with stand_ins(NAMES, SAVES) as modules:
        for save in (_plain, _by_megatron):
            with mock.patch.object(owner, at, fails), pytest.raises(ends):
                save(tmp_path, 2, _state(0, 2.0), Loop(tmp_path, modules))
            assert names(tmp_path) == ["iter_0000001", folders.TRACKER]


def test_a_forked_process_waits_for_no_thread_of_its_parent(one_rank: None, tmp_path: Path) -> None:
    with _slow_threads(), AsyncSaver() as saver:
        saver.save(tmp_path, 1, _state(0, 1.0))
        child = os.fork()
        if child == 0:
            running.wait(tmp_path)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert saver.busy


def _failing(calls: str) -> Any:
    """Patches os.rename and os.replace to fail for targets of this name."""
    originals = {name: getattr(os, name) for name in ("rename", "replace")}

    def patched(name: str) -> Any:
        def call(source: Any, target: Any, **options: Any) -> None:
            if Path(target).name == calls:
                raise NO_SPACE
            originals[name](source, target, **options)

        return call

    return mock.patch.multiple(os, **{name: patched(name) for name in originals})


@pytest.mark.parametrize("before", [1, 2])
def test_a_full_disk_is_called_one_in_each_rename(
    one_rank: None, tmp_path: Path, before: int
) -> None:
    """before: the iteration that is there; if it is the one that is saved, it keeps its name."""
    save_checkpoint(tmp_path, before, _state(0, 1.0))
    with (
        _failing("iter_0000002"),
        pytest.raises(CheckpointError, match="No space left on device") as error,
    ):
        save_checkpoint(tmp_path, 2, _state(0, 2.0))
    assert "another job" not in str(error.value)
    _, loaded = load_checkpoint(tmp_path, _state(0, 0.0))
    assert loaded["number"] == 1.0
    save_checkpoint(tmp_path, 2, _state(0, 3.0))
    assert names(tmp_path) == sorted({f"iter_{i:07d}" for i in (before, 2)}) + [folders.TRACKER]


def test_a_save_that_fails_when_it_is_complete_says_that_it_is(
    one_rank: None, tmp_path: Path
) -> None:
    save_checkpoint(tmp_path, 1, _state(0, 1.0))
    said = "iter_0000002 is complete, but the save failed after that .*No space left"
    with _failing(folders.TRACKER), pytest.raises(CheckpointError, match=said):
        save_checkpoint(tmp_path, 2, _state(0, 2.0))
    assert folders.read_tracker(tmp_path) == 1
    _check(tmp_path, 0, 2, 2.0)


def test_an_error_behind_the_tracker_is_a_warning(one_rank: None, tmp_path: Path) -> None:
    for iteration in (1, 2):
        save_checkpoint(tmp_path, iteration, _state(0, 1.0))
    fails = mock.Mock(side_effect=PermissionError(13, "Permission denied"))
    with (
        mock.patch.object(publishing, "_stale", fails),
        pytest.warns(UserWarning, match="could not be looked for .*Permission denied"),
    ):
        save_checkpoint(tmp_path, 3, _state(0, 3.0))
    assert folders.read_tracker(tmp_path) == 3


# Two jobs, of which the other one acts between two calls of this one.


def _other_job(tmp_path: Path, iteration: int, number: float) -> None:
    """A save by another job: nothing that this process knows of its own is known to it."""
    with mock.patch.multiple(running, _FOLDERS=set(), _BEGUN={}, _TRACKED={}, _WRITES={}):
        save_checkpoint(tmp_path, iteration, _state(0, number))


@pytest.mark.parametrize("at", ["rename", "rmtree", "rmdir", "unlink"])
@pytest.mark.parametrize("moment", range(1, 5))
def test_another_job_between_the_steps_of_this_one_loses_nothing(
    one_rank: None, tmp_path: Path, at: str, moment: int
) -> None:
    """moment: before which call of that name the other job saves the same iteration."""
    for iteration in (1, 2):
        save_checkpoint(tmp_path, iteration, _state(0, 1.0))
    folders.final_folder(tmp_path, 0).mkdir()  # of a save by Megatron that was killed
    owner: Any = {"rmtree": publishing.shutil, "rename": os}.get(at, Path)
    original = getattr(owner, at)
    seen = 0

    def call(*args: Any, **options: Any) -> Any:
        nonlocal seen
        seen += 1
        if seen == moment:
            with mock.patch.object(owner, at, original):
                _other_job(tmp_path, 2, 3.0)
        return original(*args, **options)

    with mock.patch.object(owner, at, call), warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            save_checkpoint(tmp_path, 2, _state(0, 2.0))
            allowed = {2.0, 3.0}
        except CheckpointError as error:
            assert "is gone (another job saves to" in str(error), sys.exc_info()
            allowed = {3.0}
    _, loaded = load_checkpoint(tmp_path, _state(0, 0.0))
    assert loaded["number"] in allowed
    assert folders.complete_iterations(tmp_path) == (1, 2)
    assert not [name for name in names(tmp_path) if name.startswith(("tmp.iter", "old."))]


def test_an_empty_folder_into_which_another_job_renames_is_not_deleted(
    one_rank: None, tmp_path: Path
) -> None:
    """Megatron makes it, and another job has renamed its checkpoint to it since we looked."""
    empty = folders.final_folder(tmp_path, 1)
    empty.mkdir(parents=True)
    rmdir = Path.rmdir

    def late(path: Path) -> None:
        if path == empty:
            _other_job(tmp_path, 1, 1.0)
        rmdir(path)

    with mock.patch.object(Path, "rmdir", late):
        save_checkpoint(tmp_path, 2, _state(0, 2.0))
    assert folders.complete_iterations(tmp_path) == (1, 2)


def test_what_the_tracker_names_is_not_pruned(one_rank: None, tmp_path: Path) -> None:
    """Another job has named an older one since this job's save was published."""
    for iteration in (1, 2):
        save_checkpoint(tmp_path, iteration, _state(0, 1.0))
    (tmp_path / folders.TRACKER).write_text("1")
    assert publishing.surplus(tmp_path, 1) == []
    (tmp_path / folders.TRACKER).write_text("2")
    assert publishing.surplus(tmp_path, 1) == [folders.final_folder(tmp_path, 1)]
