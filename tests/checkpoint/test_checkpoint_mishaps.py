"""What a full disk, a checkpoint that was moved away, and a second job do to a save."""

from __future__ import annotations

import multiprocessing
import os
import resource
import shutil
import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch import run_ranks

from megatron_fsdp_adapter.checkpoint import AsyncSaver, CheckpointError, folders, record, storage
from megatron_fsdp_adapter.checkpoint.dcp import latest_iteration, load_checkpoint, save_checkpoint

MIB = 1 << 20


def _state(rank: int, number: float, nbytes: int = 1 << 16) -> dict[str, Any]:
    return {"model": {f"w{rank}": torch.full((nbytes // 4,), number)}, "number": number}


def _names(root: str | Path) -> list[str]:
    return sorted(path.name for path in Path(root).iterdir())


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path | None]:
    """A file system of 2 MiB; None where this process may not mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    mount = shutil.which("mount")
    if not mount or subprocess.run(command, capture_output=True).returncode:
        yield None
        return
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def _check_failure(error: pytest.ExceptionInfo[CheckpointError], why: str, size: int) -> None:
    text = str(error.value)
    assert why in text and "inline_container" not in text, text
    assert any(f"__{rank}_0.distcp" in text for rank in range(size)), text


def _a_save_that_does_not_fit(rank: int, size: int, root: str, why: str) -> None:
    save_checkpoint(root, 1, _state(rank, 1.0))
    dist.barrier()
    names, free = _names(root), shutil.disk_usage(root).free
    big = _state(rank, 2.0, 5 * MIB // 4)
    with pytest.raises(CheckpointError) as error:
        save_checkpoint(root, 2, big)
    _check_failure(error, why, size)
    # At once, and not when the next save succeeds; on a rank that returns before the other too.
    assert _names(root) == names
    assert shutil.disk_usage(root).free >= min(free, MIB)
    with AsyncSaver() as saver:
        saver.save(root, 2, big)
        with pytest.raises(CheckpointError) as error:
            saver.wait()
        _check_failure(error, why, size)
        assert _names(root) == names
        # The very iteration that is there.
        saver.save(root, 1, big)
        with pytest.raises(CheckpointError, match=why):
            saver.wait()
        assert _names(root) == names
        assert load_checkpoint(root, _state(rank, 0.0))[1]["number"] == 1.0
        dist.barrier()
        saver.save(root, 3, _state(rank, 3.0))
    assert load_checkpoint(root, _state(rank, 0.0), check_digests=True)[1]["number"] == 3.0


def _full(rank: int, size: int, disk: str | None, work: str) -> None:
    if disk is not None:
        _a_save_that_does_not_fit(rank, size, f"{disk}/root", "No space left on device")
    # An error of the system that needs no right to mount.
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, hard))
    _a_save_that_does_not_fit(rank, size, f"{work}/root", "File too large")


def test_a_save_that_does_not_fit_leaves_nothing_and_says_why(
    small_disk: Path | None, tmp_path: Path
) -> None:
    run_ranks(_full, 2, None if small_disk is None else str(small_disk), str(tmp_path))


def test_a_tracker_that_cannot_be_written_publishes_nothing(
    one_rank: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(tmp_path, 1, _state(0, 1.0))

    def fails(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(folders, "_write_synced", fails)
    for iteration in (1, 2):
        with pytest.raises(CheckpointError, match="No space left on device"):
            save_checkpoint(tmp_path, iteration, _state(0, 2.0))
        assert _names(tmp_path) == ["iter_0000001", folders.TRACKER]
        assert load_checkpoint(tmp_path, _state(0, 0.0))[1]["number"] == 1.0


def _moved_away(root: Path, iteration: int, elsewhere: Path) -> Path:
    """Archives a checkpoint: it lies in another folder, and a link in its place."""
    folder = folders.final_folder(root, iteration)
    shutil.move(folder, elsewhere / folder.name)
    folder.symlink_to(elsewhere / folder.name)
    return elsewhere / folder.name


def test_links_to_checkpoints_elsewhere_are_unlinked(one_rank: None, tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
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
        assert _names(root) == ["iter_0000005", folders.TRACKER]
        # What the links led to is not the root's to delete.
        assert all((folder / ".metadata").is_file() for folder in archived)
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
    assert _names(tmp_path) == ["iter_0000001", "iter_0000002", folders.TRACKER]
    with pytest.raises(FileNotFoundError) as error:
        load_checkpoint(tmp_path, _state(0, 0.0), iteration=1)
    assert "half-written" not in str(error.value)


def test_what_cannot_be_deleted_is_one_warning_after_the_checkpoint_is_there(
    one_rank: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for iteration in (1, 2, 3):
        save_checkpoint(tmp_path, iteration, _state(0, float(iteration)))
    rmtree, tracker = shutil.rmtree, []

    def busy(path: Path, **options: Any) -> None:
        tracker.append(latest_iteration(tmp_path))
        if "iter_0000001" in path.name:
            raise OSError(16, "Device or resource busy")
        rmtree(path, **options)

    monkeypatch.setattr(shutil, "rmtree", busy)
    with pytest.warns(UserWarning, match="(?s)could not be deleted.*iter_0000001.*busy") as told:
        save_checkpoint(tmp_path, 4, _state(0, 4.0), keep_last=1)
    assert len([w for w in told if "deleted" in str(w.message)]) == 1
    assert tracker == [4, 4, 4] and folders.complete_iterations(tmp_path) == (4,)
    monkeypatch.undo()
    save_checkpoint(tmp_path, 5, _state(0, 5.0), keep_last=1)
    assert _names(tmp_path) == ["iter_0000005", folders.TRACKER]


HELD: tuple[tuple[Any, str], ...] = (
    (storage, "_write_file"),
    (record, "write_record"),
    (folders, "rename_into_place"),
)
"""Where the first job is held up while the second one saves."""


def _two_jobs(rank: int, size: int, work: str) -> None:
    """Each rank is a job of its own."""
    group = [dist.new_group([r]) for r in range(size)][rank]
    keys = [_state(r, 0.0)["model"] for r in range(size)]
    for owner, name in HELD:
        root = f"{work}/{name}"
        if rank == 0:
            original = getattr(owner, name)

            def held(*args: Any, original: Any = original) -> Any:
                dist.barrier()
                dist.barrier()
                return original(*args)

            setattr(owner, name, held)
            with pytest.raises(CheckpointError, match="another job saves to") as error:
                save_checkpoint(root, 10, {**_state(0, 1.0), "x": torch.ones(3)}, group=group)
            assert str(error.value).count("another job") == 1
            setattr(owner, name, original)
        else:
            dist.barrier()
            save_checkpoint(root, 10, {**_state(1, 2.0), "x": torch.zeros(3)}, group=group)
            dist.barrier()
        dist.barrier()
        assert _names(root) == ["iter_0000010", folders.TRACKER]
        target = {"model": keys[1], "number": 0, "x": torch.ones(3)}
        _, loaded = load_checkpoint(root, target, check_digests=True, group=group)
        assert loaded["number"] == 2.0 and bool((loaded["model"]["w1"] == 2).all())
        dist.barrier()
    _race(rank, f"{work}/race", group)


def _race(rank: int, root: str, group: Any) -> None:
    """Both at once, several times: whoever wins, what is there is wholly one job's."""
    won = 0
    for turn in range(5):
        dist.barrier()
        state = {"model": {"w": torch.full((1000,), float(rank))}, "number": (rank, turn)}
        try:
            save_checkpoint(root, 10, state, group=group)
            won += 1
        except CheckpointError as error:
            assert "another job" in str(error), error
        dist.barrier()
        target = {"model": {"w": torch.empty(1000)}, "number": ()}
        _, loaded = load_checkpoint(root, target, check_digests=True, group=group)
        winner, at = loaded["number"]
        assert bool((loaded["model"]["w"] == winner).all()) and at == turn
    total = torch.tensor([won])
    dist.all_reduce(total)
    assert int(total) >= 5


def _one_file(rank: int, size: int, path: Path) -> None:
    """The first rank is in the middle of it while the second one begins, and fails."""
    if rank == 0:
        with folders.replacing(path) as temporary:
            temporary.write_text("first")
            dist.barrier()
            dist.barrier()
    else:
        dist.barrier()
        with pytest.raises(OSError, match="no disk"), folders.replacing(path):
            raise OSError("no disk")
        dist.barrier()


def _killed(path: str) -> None:
    with folders.replacing(Path(path)) as temporary:
        temporary.write_text("half")
        os._exit(1)


def test_a_file_that_another_process_writes_is_left_to_it(tmp_path: Path) -> None:
    path = tmp_path / folders.TRACKER
    run_ranks(_one_file, 2, path)
    assert path.read_text() == "first" and _names(tmp_path) == [path.name]


def test_what_a_dead_process_left_beside_a_file_is_deleted(tmp_path: Path) -> None:
    """And what one of another machine, or of an earlier release, left is kept, or deleted."""
    path = tmp_path / folders.TRACKER
    killed = multiprocessing.get_context("fork").Process(target=_killed, args=(str(path),))
    killed.start()
    killed.join()
    [left] = _names(tmp_path)
    elsewhere = f"tmp.{path.name}.{'0' * 8}-{killed.pid}.{'0' * 8}"
    for name in (elsewhere, f"tmp.{path.name}.{'0' * 8}", f"tmp.{path.name}"):
        (tmp_path / name).touch()
    folders.write_atomically(path, "10")
    assert str(killed.pid) in left and _names(tmp_path) == sorted([path.name, elsewhere])


def test_two_jobs_that_save_the_same_iteration_do_not_mix(tmp_path: Path) -> None:
    run_ranks(_two_jobs, 2, str(tmp_path))
    assert os.listdir(tmp_path / "race")
