"""A process that dies while it saves leaves the checkpoint that was there before loadable."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoint_cases import data_mesh, plan, same, sharded_tensors
from launch import run_ranks

from megatron_fsdp_adapter.checkpoint import digests, folders
from megatron_fsdp_adapter.checkpoint.coordination import CheckpointError
from megatron_fsdp_adapter.checkpoint.dcp import (
    latest_iteration,
    load_checkpoint,
    save_checkpoint,
)
from megatron_fsdp_adapter.prove import ranks

# Every call by which Python code changes a file system announces itself by one of these.
_EVENTS = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate")


def _state(rank: int, size: int, number: float) -> dict[str, Any]:
    tensors = sharded_tensors(plan(size), rank, data_mesh(size), torch.float32)
    for tensor in tensors.values():
        tensor._local_tensor.mul_(number)
    return {"model": tensors, "number": number}


def _kill_at(operation: int) -> None:
    """Has this process killed, as by kill -9, just before its operation of this number."""
    seen = 0

    def hook(event: str, _: Any) -> None:
        nonlocal seen
        if event in _EVENTS:
            seen += 1
            if seen == operation:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def _in_child(store: str, step: Callable[[], None]) -> int:
    """Runs `step` as the only rank in a forked process; its wait status."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
            step()
            status = 0
        finally:
            os._exit(status)
    status = os.waitpid(child, 0)[1]
    Path(store).unlink(missing_ok=True)
    return status


def _check(root: Path, allowed: dict[int, tuple[float, ...]]) -> None:
    number = latest_iteration(root)
    target = _state(0, 1, -1.0)
    iteration, loaded = load_checkpoint(root, target)
    assert iteration == number and loaded["number"] in allowed[iteration], (number, loaded)
    assert same(loaded, _state(0, 1, loaded["number"]))


def _check_and_save_again(root: Path, allowed: dict[int, tuple[float, ...]], keep: int) -> None:
    _check(root, allowed)
    save_checkpoint(root, 10, _state(0, 1, 3.0), keep_last=keep)
    _check(root, {10: (3.0,)})
    names = sorted(path.name for path in root.iterdir())
    kept = ["iter_0000005"] if (root / "iter_0000005").exists() else []
    assert names == [*kept, "iter_0000010", folders.TRACKER], names


def _all_kills(work: str, before: int, keep: int, results: Any) -> None:
    ranks.end_with_parent()
    torch.set_num_threads(1)
    allowed = {before: (1.0, 2.0) if before == 10 else (1.0,), 10: (1.0, 2.0)}
    operation, status, old, new = 0, -1, 0, 0
    # Whatever is imported at first use is imported here, once, and not in every child.
    dist.init_process_group("gloo", init_method=f"file://{work}/warm", rank=0, world_size=1)
    save_checkpoint(f"{work}/0", 1, _state(0, 1, 1.0))
    load_checkpoint(f"{work}/0", _state(0, 1, 1.0))
    dist.destroy_process_group()
    while status != 0:
        operation += 1
        root = Path(work) / str(operation)
        store = f"{work}/store"

        def save_first(root: Path = root) -> None:
            save_checkpoint(root, before, _state(0, 1, 1.0))

        def save_and_die(root: Path = root, operation: int = operation) -> None:
            state = _state(0, 1, 2.0)
            _kill_at(operation)
            save_checkpoint(root, 10, state, keep_last=keep)

        def verify(root: Path = root) -> None:
            _check_and_save_again(root, allowed, keep)

        assert _in_child(store, save_first) == 0
        status = _in_child(store, save_and_die)
        assert status in (0, signal.SIGKILL), status
        if (root / folders.TRACKER).read_text() == "10":
            new += 1
        else:
            old += 1
        assert _in_child(store, verify) == 0, f"killed at operation {operation}"
    results.put((operation, old, new))


@pytest.mark.parametrize(("before", "keep"), [
    (5, 2),
    pytest.param(5, 1, marks=pytest.mark.full),
    pytest.param(10, 1, marks=pytest.mark.full),
])
def test_kill_at_every_operation_of_a_save(tmp_path: Path, before: int, keep: int) -> None:
    """before=10: the checkpoint being replaced is the only one there is."""
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    process = context.Process(target=_all_kills, args=(str(tmp_path), before, keep, results))
    with ranks.running([process]):
        process.join(timeout=300)
        assert process.exitcode == 0
        operations, old, new = results.get()
    assert operations > 10, "the hook saw too little of the save to mean anything"
    assert before == 10 or (old > 5 and new > 0), (old, new)


FAILING: tuple[tuple[Any, str, int], ...] = (
    (folders, "prepare_folder", 0),
    (digests.DigestingFile, "write", 1),
    (folders, "sync_files", 0),
    (folders, "publish", 0),
    (folders, "rename_into_place", 0),
)
"""What fails, and on which rank: everything but the data is written by the first."""


def _failure_on_one_rank(
    rank: int, size: int, root: str, owner: Any, stage: str, failing: int
) -> None:
    save_checkpoint(root, 1, _state(rank, size, 1.0))
    original = getattr(owner, stage)

    def fails(*args: Any) -> Any:
        raise OSError(28, "No space left on device")

    setattr(owner, stage, fails if rank == failing else original)
    with pytest.raises(CheckpointError, match="No space left on device"):
        save_checkpoint(root, 2, _state(rank, size, 2.0))
    setattr(owner, stage, original)
    dist.barrier()
    target = _state(rank, size, 0.0)
    iteration, loaded = load_checkpoint(root, target)
    assert iteration == 1
    assert same(loaded, _state(rank, size, float(iteration)))
    save_checkpoint(root, 2, _state(rank, size, 3.0))
    assert load_checkpoint(root, target)[1]["number"] == 3.0


def _failures(rank: int, size: int, work: str) -> None:
    for owner, stage, failing in FAILING:
        _failure_on_one_rank(rank, size, f"{work}/{stage}", owner, stage, failing)


def test_a_failure_on_one_rank_is_an_error_on_all(tmp_path: Path) -> None:
    run_ranks(_failures, 2, str(tmp_path))


def _peer_dies(rank: int, size: int, root: str) -> None:
    save_checkpoint(root, 1, _state(rank, size, 1.0))
    state = _state(rank, size, 2.0)
    if rank == 1:
        _kill_at(1)
    try:
        save_checkpoint(root, 2, state)
    except RuntimeError as error:
        Path(root, "seen").write_text(str(error))
        return
    raise AssertionError("the save went through without rank 1")


def test_a_rank_that_dies_does_not_hang_the_others(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="rank 1") as failure:
        run_ranks(_peer_dies, 2, str(tmp_path))
    assert "went through" not in str(failure.value)
    assert (tmp_path / "seen").read_text()
    run_ranks(_load_first, 2, str(tmp_path))


def _load_first(rank: int, size: int, root: str) -> None:
    iteration, loaded = load_checkpoint(root, _state(rank, size, 0.0))
    assert iteration == 1 and same(loaded, _state(rank, size, 1.0))
