"""What goes wrong while a checkpoint is saved: each rank says why, nothing of the failed save is
left, the checkpoint before stays, and the next save works."""

from __future__ import annotations

import contextlib
import resource
import shutil
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_fsdp_adapter.checkpoint import (
    AsyncSaver,
    CheckpointError,
    atomic,
    digests,
    folders,
    publishing,
    record,
)
from megatron_fsdp_adapter.checkpoint import storage as writing
from megatron_fsdp_adapter.checkpoint.dcp import latest_iteration, load_checkpoint, save_checkpoint
from tests.lib.checkpoint.checkpoint_cases import names, numbered_state, same
from tests.lib.ranks.launch import run_ranks

CHECKS = (
    "checkpoint/dcp.py",
    "checkpoint/storage.py",
    "checkpoint/publishing.py",
    "checkpoint/coordination.py",
    "checkpoint/digests.py",
)

MIB = 1 << 20
NO_SPACE = "No space left on device"
Save = Callable[[str, int, dict[str, Any]], Any]


def _state(rank: int, number: float, nbytes: int = 1 << 16) -> dict[str, Any]:
    return {"model": {f"w{rank}": torch.full((nbytes // 4,), number)}, "number": number}


def _in_background(ends_with: str, root: str, iteration: int, state: dict[str, Any]) -> None:
    """The error is raised by what the saver is asked for next."""
    with contextlib.closing(AsyncSaver()) as saver:
        saver.save(root, iteration, state)
        if ends_with == "save":
            saver.save(root, iteration + 5, state)
        elif ends_with == "wait":
            saver.wait()


SAVES: tuple[Save, ...] = (
    save_checkpoint,
    *(partial(_in_background, end) for end in ("wait", "save", "close")),
)

FAULTS: tuple[tuple[Any, str, int], ...] = (
    (publishing, "prepare_folder", 0),
    (writing, "_write_file", 1),
    (digests.DigestingFile, "write", 1),
    (atomic, "sync_files", 0),
    (publishing, "write_synced", 0),
    (publishing, "publish", 0),
    (publishing, "rename_into_place", 0),
)
"""What fails, and on which rank: everything but the data is written by the first."""


def _check_failure(save: Save, root: str, rank: int, state: dict[str, Any], why: str) -> str:
    """Of another iteration, and of the very one that is there; what the last error says."""
    before = names(root)
    for iteration in (2, 1):
        with pytest.raises(CheckpointError, match=why) as error:
            save(root, iteration, state)
        # At once, and not when the next save succeeds; on a rank that returns before others too.
        assert names(root) == before
        dist.barrier()
    return str(error.value)


def _faults(rank: int, size: int, work: str) -> None:
    for owner, stage, failing in FAULTS:
        root = f"{work}/{stage}"
        target = numbered_state(rank, size, 0.0)
        save_checkpoint(root, 1, numbered_state(rank, size, 1.0))
        fails = mock.Mock(side_effect=OSError(28, NO_SPACE))
        for save in SAVES:
            step = fails if rank == failing else getattr(owner, stage)
            with mock.patch.object(owner, stage, step):
                _check_failure(save, root, rank, numbered_state(rank, size, 2.0), NO_SPACE)
            iteration, loaded = load_checkpoint(root, target)
            assert iteration == 1, stage
            assert same(loaded, numbered_state(rank, size, 1.0)), stage
        save_checkpoint(root, 2, numbered_state(rank, size, 3.0))
        assert load_checkpoint(root, target)[1]["number"] == 3.0


def test_a_failure_on_one_rank_is_an_error_on_all_and_leaves_nothing(tmp_path: Path) -> None:
    run_ranks(_faults, 2, str(tmp_path))


def _full(rank: int, size: int, root: str) -> None:
    save_checkpoint(root, 1, _state(rank, 1.0))
    dist.barrier()
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, hard))
    for save in SAVES:
        state = _state(rank, 2.0, 5 * MIB // 4)
        text = _check_failure(save, root, rank, state, "File too large")
        assert "inline_container" not in text, text
        assert any(f"__{rank}_0.distcp" in text for rank in range(size)), text
    assert load_checkpoint(root, _state(rank, 0.0))[1]["number"] == 1.0
    dist.barrier()
    save_checkpoint(root, 3, _state(rank, 3.0))
    assert load_checkpoint(root, _state(rank, 0.0))[1]["number"] == 3.0


def test_a_save_that_does_not_fit_leaves_nothing_and_says_why(tmp_path: Path) -> None:
    """By an error of the system, as of a full disk, in the middle of torch.save."""
    run_ranks(_full, 2, str(tmp_path))


# What is there under a name, and is not a folder of ours.


def _moved_away(root: Path, iteration: int, elsewhere: Path) -> Path:
    """Archives a checkpoint: it lies in another folder, and a link in its place."""
    folder = folders.final_folder(root, iteration)
    shutil.move(folder, elsewhere / folder.name)
    folder.symlink_to(elsewhere / folder.name)
    return elsewhere / folder.name


def test_links_to_checkpoints_elsewhere_are_unlinked(one_rank: None, tmp_path: Path) -> None:
    root = tmp_path / "root"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for iteration in (1, 2, 3):
            save_checkpoint(root, iteration, _state(0, float(iteration)))
        archived = [_moved_away(root, i, elsewhere) for i in (1, 2)]
        assert load_checkpoint(root, _state(0, 0.0), iteration=1)[1]["number"] == 1.0
        save_checkpoint(root, 4, _state(0, 4.0), keep_last=3)
        assert folders.complete_iterations(root) == (2, 3, 4)
        save_checkpoint(root, 5, _state(0, 5.0), keep_last=1)
        assert names(root) == ["iter_0000005", folders.TRACKER]
        # What the links led to is not the root's to delete.
        for folder in archived:
            assert (folder / ".metadata").is_file()
        # Saved again where a link is, and where one leads nowhere.
        folders.final_folder(root, 6).symlink_to(archived[0])
        folders.final_folder(root, 7).symlink_to(elsewhere / "gone")
        for iteration in (6, 7):
            save_checkpoint(root, iteration, _state(0, float(iteration)))
            assert not folders.final_folder(root, iteration).is_symlink()
        assert (archived[0] / ".metadata").is_file()
    assert folders.complete_iterations(root) == (5, 6, 7)


def test_a_link_that_leads_nowhere_is_left_alone(one_rank: None, tmp_path: Path) -> None:
    (tmp_path / "iter_0000001").symlink_to(tmp_path / "disk that is not mounted")
    save_checkpoint(tmp_path, 2, _state(0, 2.0), keep_last=1)
    assert names(tmp_path) == ["iter_0000001", "iter_0000002", folders.TRACKER]
    with pytest.raises(FileNotFoundError) as error:
        load_checkpoint(tmp_path, _state(0, 0.0), iteration=1)
    assert "half-written" not in str(error.value)


def test_what_cannot_be_deleted_is_one_warning_after_the_checkpoint_is_there(
    one_rank: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for iteration in (1, 2, 3):
        save_checkpoint(tmp_path, iteration, _state(0, float(iteration)))
    rmtree = shutil.rmtree
    tracker = []

    def busy(path: Path, **options: Any) -> None:
        tracker.append(latest_iteration(tmp_path))
        if "iter_0000001" in path.name:
            raise OSError(16, "Device or resource busy")
        rmtree(path, **options)

    monkeypatch.setattr(shutil, "rmtree", busy)
    with pytest.warns(UserWarning, match="(?s)could not be deleted.*iter_0000001.*busy") as warned:
        save_checkpoint(tmp_path, 4, _state(0, 4.0), keep_last=1)
    assert len([w for w in warned if "deleted" in str(w.message)]) == 1
    assert tracker == [4, 4, 4]
    assert folders.complete_iterations(tmp_path) == (4,)
    monkeypatch.undo()
    save_checkpoint(tmp_path, 5, _state(0, 5.0), keep_last=1)
    assert names(tmp_path) == ["iter_0000005", folders.TRACKER]


# Two jobs.

HELD: tuple[tuple[Any, str], ...] = (
    (writing, "_write_file"),
    (record, "write_record"),
    (publishing, "rename_into_place"),
)
"""Where the first job is held up while the second one saves."""


def _two_jobs(rank: int, size: int, work: str) -> None:
    """Each rank is a job of its own."""
    group = [dist.new_group([r]) for r in range(size)][rank]
    keys = [_state(r, 0.0)["model"] for r in range(size)]
    for owner, name in HELD:
        root = f"{work}/{name}"
        original = getattr(owner, name)

        def held(*args: Any, original: Any = original) -> Any:
            dist.barrier()
            dist.barrier()
            return original(*args)

        if rank == 0:
            state = {**_state(0, 1.0), "x": torch.ones(3)}
            taken = pytest.raises(CheckpointError, match="is gone .another job saves to")
            with mock.patch.object(owner, name, held), taken as error:
                save_checkpoint(root, 10, state, group=group)
            assert str(error.value).count("another job") == 1
        else:
            dist.barrier()
            save_checkpoint(root, 10, {**_state(1, 2.0), "x": torch.zeros(3)}, group=group)
            dist.barrier()
        dist.barrier()
        assert names(root) == ["iter_0000010", folders.TRACKER]
        target = {"model": keys[1], "number": 0, "x": torch.ones(3)}
        _, loaded = load_checkpoint(root, target, group=group)
        assert loaded["number"] == 2.0
        assert bool((loaded["model"]["w1"] == 2).all())
        dist.barrier()


def test_two_jobs_that_save_the_same_iteration_do_not_mix(tmp_path: Path) -> None:
    run_ranks(_two_jobs, 2, str(tmp_path))
    assert not list(tmp_path.glob("*/tmp.*"))
