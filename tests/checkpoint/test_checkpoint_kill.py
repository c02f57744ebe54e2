"""`kill -9` while a checkpoint is saved: what was confirmed is not lost, and nothing hangs.

One process is killed before each of its operations on the file system in turn; two processes at
moments that are what they happen to be, alone or together, while they save at once, in the
background, and by Megatron's own code.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
import time
import types
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoint_cases import names, numbered_state, same
from launch import PRELOADED, run_ranks
from torch.distributed import checkpoint as torch_dcp

from megatron_fsdp_adapter.checkpoint import AsyncSaver, folders, load_checkpoint, save_checkpoint
from megatron_fsdp_adapter.cli import verify
from megatron_fsdp_adapter.megatron.compat import patches
from megatron_fsdp_adapter.megatron.compat.table import LM, SAVES
from megatron_fsdp_adapter.prove.ranks import end_with_parent, rendezvous, running

FULL = pytest.mark.full

# Before each operation.

EVENTS = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate")
"""By these every call announces itself with which Python code changes a file system."""


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
    root: Path, iteration: int, number: float, keep: int | None = None, operation: int = 0
) -> None:
    state = numbered_state(0, 1, number)
    if operation:
        _kill_before(operation)
    save_checkpoint(root, iteration, state, keep_last=keep)


def _check_loads(root: Path, allowed: dict[int, tuple[float, ...]]) -> None:
    iteration, loaded = load_checkpoint(root, numbered_state(0, 1, -1.0))
    assert iteration == folders.read_tracker(root) and loaded["number"] in allowed[iteration]
    assert same(loaded, numbered_state(0, 1, loaded["number"]))


def _check_and_save_again(root: Path, allowed: dict[int, tuple[float, ...]], keep: int) -> None:
    _check_loads(root, allowed)
    _save(root, 10, 3.0, keep)
    _check_loads(root, {10: (3.0,)})
    kept = ["iter_0000005"] if (root / "iter_0000005").exists() else []
    assert names(root) == [*kept, "iter_0000010", folders.TRACKER]


def _all_kills(rank: int, size: int, work: str, before: int, keep: int) -> list[int]:
    """The newest iteration after each kill."""
    allowed = {before: (1.0, 2.0) if before == 10 else (1.0,), 10: (1.0, 2.0)}
    # What is imported at first use is imported here, once, and not in every child.
    _save(Path(work, "0"), 1, 1.0)
    _check_loads(Path(work, "0"), {1: (1.0,)})
    dist.destroy_process_group()
    newest: list[int] = []
    status = -1
    while status != 0:
        root = Path(work, str(len(newest) + 1))
        assert _in_child(work, _save, root, before, 1.0) == 0
        status = _in_child(work, _save, root, 10, 2.0, keep, len(newest) + 1)
        assert status in (0, signal.SIGKILL), status
        newest.append(folders.read_tracker(root))
        assert _in_child(work, _check_and_save_again, root, allowed, keep) == 0, len(newest)
    # What this rank ends with.
    dist.init_process_group("gloo", init_method=f"file://{work}/end", rank=0, world_size=1)
    return newest


@pytest.mark.parametrize(
    ("before", "keep"), [(5, 2), pytest.param(5, 1, marks=FULL), pytest.param(10, 1, marks=FULL)]
)
def test_a_kill_at_every_operation_of_a_save_loses_nothing(
    tmp_path: Path, before: int, keep: int
) -> None:
    """before=10: the checkpoint being replaced is the only one there is."""
    [newest] = run_ranks(_all_kills, 1, str(tmp_path), before, keep, timeout=300)
    assert len(newest) > 10, "the hook saw too little of the save to mean anything"
    assert before == 10 or (newest.count(5) > 5 and newest.count(10) > 0), newest


def _peer_dies(rank: int, size: int, root: str) -> None:
    save_checkpoint(root, 1, numbered_state(rank, size, 1.0))
    state = numbered_state(rank, size, 2.0)
    if rank == 1:
        _kill_before(1)
    try:
        save_checkpoint(root, 2, state)
    except RuntimeError as error:
        Path(root, "seen").write_text(str(error))
        return
    raise AssertionError("the save went through without rank 1")


def test_a_rank_that_dies_does_not_hang_the_others(one_rank: None, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="rank 1") as failure:
        run_ranks(_peer_dies, 2, str(tmp_path))
    assert "went through" not in str(failure.value)
    assert (tmp_path / "seen").read_text()
    _check_loads(tmp_path, {1: (1.0,)})


# At any moment.

RANKS = 2
SHAPES = {"embedding": (601, 512), "fc": (1024, 600), "norm": (3,)}
"""Some MB a rank, so that writing takes a good part of the time."""

STARTS_S, HANGS_S = 240.0, 180.0
"""How long two processes may take to have saved twice, and to notice that a peer died. A hang is
for ever; a machine that is overloaded is slow."""

VICTIMS: tuple[tuple[int, ...], ...] = ((0,), (1,), (0, 1))
Saver = Callable[[int, dict[str, Any]], int]
"""Saves; returns the iteration that is certain to be there."""


def _sync(root: str) -> Saver:
    def save(iteration: int, state: dict[str, Any]) -> int:
        save_checkpoint(root, iteration, state, keep_last=2)
        return iteration

    return save


def _background(root: str) -> Saver:
    saver = AsyncSaver()

    def save(iteration: int, state: dict[str, Any]) -> int:
        saver.save(root, iteration, state, keep_last=2)
        return iteration - 10  # the one before is what is certain now

    return save


def _megatron(root: str) -> Saver:
    """What Megatron-LM's save_checkpoint does with files, by the names that it uses."""
    module = types.ModuleType(LM)
    module.torch, module.open_file = torch, open  # type: ignore[attr-defined]
    sys.modules[LM] = module
    patches.install(SAVES)

    def save(iteration: int, state: dict[str, Any]) -> int:
        folder = folders.final_folder(Path(root), iteration)
        if dist.get_rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
        checkpoint = module.torch.distributed.checkpoint
        checkpoint.save(state_dict=state, storage_writer=checkpoint.FileSystemWriter(str(folder)))
        module.torch.distributed.barrier()
        if dist.get_rank() == 0:
            with module.open_file(str(Path(root, folders.TRACKER)), "w") as file:
                file.write(str(iteration))
        module.torch.distributed.barrier()
        return iteration

    return save


MODES: dict[str, Callable[[str], Saver]] = {
    "sync": _sync, "async": _background, "megatron": _megatron,
}  # fmt: skip


def _saves_until_killed(mode: str, rank: int, where: dict[str, str], root: str, done: Any) -> None:
    """Saves and saves; `done` gets the iteration that is certain to be there. Exit status 3: a
    save failed."""
    end_with_parent()
    torch.set_num_threads(1)
    os.environ.update(where, RANK=str(rank))
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    save = MODES[mode](root)
    try:
        for iteration in range(10, 10_000, 10):
            state = numbered_state(rank, RANKS, iteration, SHAPES)
            done.value = max(save(iteration, state), done.value)
    except RuntimeError:
        os._exit(3)


def _kill(mode: str, number: int, root: Path) -> str:
    """One trial; what the kill left: "during" a save or "between" two."""
    chance = random.Random(f"{mode}{number}")
    victims = VICTIMS[number % len(VICTIMS)]
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    # Without a lock, which a process that is killed might hold for ever.
    done = [context.Value("i", 0, lock=False) for _ in range(RANKS)]
    with rendezvous(RANKS) as where:
        ranks = [
            context.Process(target=_saves_until_killed, args=(mode, r, where, str(root), done[r]))
            for r in range(RANKS)
        ]
        with running(ranks):
            deadline = time.monotonic() + STARTS_S
            while min(value.value for value in done) < 20:
                assert time.monotonic() < deadline, "the processes have not saved twice"
                time.sleep(0.002)
            time.sleep(chance.uniform(0.0, 0.15))
            for rank in victims:
                os.kill(ranks[rank].pid, signal.SIGKILL)
            certain = max(value.value for value in done)
            for rank, process in enumerate(ranks):
                process.join(HANGS_S)
                assert not process.is_alive(), f"rank {rank} hangs after {victims} were killed"
                assert process.exitcode == (-signal.SIGKILL if rank in victims else 3)
    # The newest checkpoint is no older than what had been confirmed, intact, and loads.
    iteration, loaded = load_checkpoint(root, numbered_state(0, 1, -1, SHAPES))
    assert iteration >= certain >= 20
    assert same(loaded, numbered_state(0, 1, iteration, SHAPES))
    assert verify.examine(folders.final_folder(root, iteration))["intact"]
    return "during" if folders.half_written(root) else "between"


def _goes_on(root: Path) -> None:
    """The next save after a kill works, and removes what the kill left."""
    newest = folders.read_tracker(root)
    save_checkpoint(root, newest + 100, numbered_state(0, 1, 7, SHAPES))
    assert folders.half_written(root) == ()
    assert load_checkpoint(root, numbered_state(0, 1, -1, SHAPES))[1]["number"] == 7


@pytest.mark.parametrize("during", [0, pytest.param(20, marks=FULL)])
@pytest.mark.parametrize("mode", MODES)
def test_a_kill_at_any_moment_loses_nothing(
    one_rank: None, tmp_path: Path, mode: str, during: int
) -> None:
    """Each trial: a run of two processes, killed in its third save or later. Two trials, and as
    many more as it takes until so many of them left half a save."""
    found: list[str] = []
    while len(found) < 2 or found.count("during") < during:
        assert len(found) < 120, found
        found.append(_kill(mode, len(found), tmp_path / f"{len(found)}"))
        if len(found) % 5 == 1:
            _goes_on(tmp_path / f"{len(found) - 1}")


def test_without_our_writer_a_kill_does_lose_the_name(tmp_path: Path, one_rank: None) -> None:
    """What is prevented: torch's writer leaves half a checkpoint under its final name."""
    folder = folders.final_folder(tmp_path, 10)

    class Dies(torch_dcp.FileSystemWriter):
        def finish(self, **results: Any) -> None:
            raise OSError("killed")

    with pytest.raises(torch_dcp.CheckpointException, match="killed"):
        torch_dcp.save(numbered_state(0, 1, 1), storage_writer=Dies(folder))
    assert folder.is_dir() and folders.half_written(tmp_path) == (folder.name,)
