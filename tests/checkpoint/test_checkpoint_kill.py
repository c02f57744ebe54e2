"""`kill -9` before each operation on the file system of a save: what was confirmed is not lost.

By each way to save: at once, in the background, and by Megatron's own code.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_fsdp_adapter.checkpoint import AsyncSaver, folders, load_checkpoint, save_checkpoint
from megatron_fsdp_adapter.megatron.compat.table import LM, SAVES
from megatron_fsdp_adapter.tools.cli import verify
from tests.lib.checkpoint.checkpoint_cases import names, numbered_state, same
from tests.lib.megatron.stand_ins import save_as_megatron, stand_ins
from tests.lib.ranks.launch import run_ranks

CHECKS = (
    "checkpoint/folders.py",
    "checkpoint/publishing.py",
    "checkpoint/storage.py",
    "megatron/checkpoint/megatron_saves.py",
)

FULL = pytest.mark.full

EVENTS = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate")
"""By these every call announces itself with which Python code changes a file system."""


def _in_background(root: Path, iteration: int, state: dict[str, Any], keep: int) -> None:
    with AsyncSaver() as saver:
        saver.save(root, iteration, state, keep_last=keep)


def _by_megatron(root: Path, iteration: int, state: dict[str, Any], keep: int) -> None:
    with stand_ins({LM: {"torch": torch, "open_file": open}}, SAVES) as made:
        save_as_megatron(made[LM], root, iteration, state)


SAVES_BY: dict[str, Callable[..., Any]] = {
    "at once": save_checkpoint,
    "in the background": _in_background,
    "by Megatron": _by_megatron,
}


def _kill_before(operation: int) -> None:
    """Has this process killed just before its operation of this number."""
    seen = 0

    def hook(event: str, _: Any) -> None:
        nonlocal seen
        seen += event in EVENTS
        if event in EVENTS and seen == operation:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def _in_child(work: str, step: Callable[..., None], *args: Any) -> int:
    """Runs `step` as the only rank in a forked process; its wait status."""
    store = Path(work, "store")
    child = os.fork()
    if child == 0:
        status = 1
        try:
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
            step(*args)
            status = 0
        finally:
            os._exit(status)
    status = os.waitpid(child, 0)[1]
    store.unlink(missing_ok=True)
    return status


def _save(
    by: str, root: Path, iteration: int, number: float, keep: int, operation: int = 0
) -> None:
    state = numbered_state(0, 1, number)
    if operation:
        _kill_before(operation)
    SAVES_BY[by](root, iteration, state, keep)


def _check_loads(root: Path, allowed: dict[int, tuple[float, ...]]) -> None:
    iteration, loaded = load_checkpoint(root, numbered_state(0, 1, -1.0))
    assert iteration == folders.read_tracker(root)
    assert loaded["number"] in allowed[iteration]
    assert same(loaded, numbered_state(0, 1, loaded["number"]))


def _check_and_save_again(root: Path, allowed: dict[int, tuple[float, ...]], keep: int) -> None:
    for folder in root.glob("iter_*"):  # Megatron makes an empty one before it saves
        assert not names(folder) or verify.examine(folder)["intact"], folder
    _check_loads(root, allowed)
    save_checkpoint(root, 10, numbered_state(0, 1, 3.0), keep)
    _check_loads(root, {10: (3.0,)})
    kept = ["iter_0000005"] if (root / "iter_0000005").exists() else []
    found = [name for name in names(root) if not name.startswith(f"tmp.{folders.TRACKER}")]
    assert found == [*kept, "iter_0000010", folders.TRACKER]


def _all_kills(rank: int, size: int, work: str, by: str, before: int, keep: int) -> list[int]:
    """The newest iteration after each kill."""
    allowed = {before: (1.0, 2.0) if before == 10 else (1.0,), 10: (1.0, 2.0)}
    # What is imported at first use is imported here, once, and not in every child.
    first = Path(work, "0")
    _save(by, first, before, 1.0, keep)
    _check_loads(first, {before: (1.0,)})
    dist.destroy_process_group()
    newest: list[int] = []
    status = -1
    while status != 0:
        root = Path(shutil.copytree(first, Path(work, str(len(newest) + 1))))
        status = _in_child(work, _save, by, root, 10, 2.0, keep, len(newest) + 1)
        assert status in (0, signal.SIGKILL), status
        newest.append(folders.read_tracker(root))
        assert _in_child(work, _check_and_save_again, root, allowed, keep) == 0, len(newest)
    # What this rank ends with.
    dist.init_process_group("gloo", init_method=f"file://{work}/end", rank=0, world_size=1)
    return newest


@pytest.mark.parametrize(
    ("by", "before", "keep"),
    [
        ("at once", 5, 2),
        pytest.param("at once", 5, 1, marks=FULL),
        pytest.param("at once", 10, 1, marks=FULL),
        ("in the background", 5, 1),
        ("by Megatron", 5, 1),
    ],
)
def test_a_kill_at_every_operation_of_a_save_loses_nothing(
    tmp_path: Path, by: str, before: int, keep: int
) -> None:
    """before=10: the checkpoint being replaced is the only one there is."""
    [newest] = run_ranks(_all_kills, 1, str(tmp_path), by, before, keep, timeout=300)
    assert len(newest) > 10, "the hook saw too little of the save to mean anything"
    assert before == 10 or (newest.count(5) > 5 and newest.count(10) > 0), newest


def _peer_dies(rank: int, size: int, root: str) -> None:
    save_checkpoint(root, 1, numbered_state(rank, size, 1.0))
    state = numbered_state(rank, size, 2.0)
    if rank == 1:
        _kill_before(1)
    with pytest.raises(RuntimeError) as error:
        save_checkpoint(root, 2, state)
    Path(root, "seen").write_text(str(error.value))


def test_a_rank_that_dies_does_not_hang_the_others(one_rank: None, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="rank 1"):
        run_ranks(_peer_dies, 2, str(tmp_path))
    assert (tmp_path / "seen").read_text()
    _check_loads(tmp_path, {1: (1.0,)})
