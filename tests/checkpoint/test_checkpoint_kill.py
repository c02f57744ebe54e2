"""`kill -9` at random moments of saves by two processes: nothing is lost and nothing hangs.

`test_checkpoint_crash.py` kills one process before each operation on the file system; here the
moments are what they happen to be, ranks die alone or together, and saves are synchronous, in the
background, and Megatron's own.
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
from checkpoint_cases import data_mesh, plan, sharded_tensors
from launch import PRELOADED
from torch.distributed import checkpoint as torch_dcp

from megatron_fsdp_adapter.checkpoint import AsyncSaver, folders, load_checkpoint, save_checkpoint
from megatron_fsdp_adapter.cli import verify
from megatron_fsdp_adapter.megatron.compat import patches
from megatron_fsdp_adapter.megatron.compat.table import LM, SAVES
from megatron_fsdp_adapter.prove.ranks import end_with_parent, rendezvous, running

RANKS = 2
SHAPES = {"embedding": (601, 512), "fc": (1024, 600), "norm": (3,)}
"""Some MB a rank, so that writing takes a good part of the time."""

STARTS_S, HANGS_S = 240.0, 180.0
"""How long two processes may take to have saved twice, and to notice that a peer died. A hang is
for ever; a machine that is overloaded is slow."""

VICTIMS: tuple[tuple[int, ...], ...] = ((0,), (1,), (0, 1))


def _state(rank: int, size: int, number: int) -> dict[str, Any]:
    tensors = sharded_tensors(plan(size, SHAPES), rank, data_mesh(size), torch.float32)
    for tensor in tensors.values():
        tensor._local_tensor.fill_(number)
    return {"model": tensors, "number": number}


def _sync(root: str) -> Callable[[int, dict[str, Any]], int]:
    def save(iteration: int, state: dict[str, Any]) -> int:
        save_checkpoint(root, iteration, state, keep_last=2)
        return iteration

    return save


def _background(root: str) -> Callable[[int, dict[str, Any]], int]:
    saver = AsyncSaver()

    def save(iteration: int, state: dict[str, Any]) -> int:
        saver.save(root, iteration, state, keep_last=2)
        return iteration - 10  # the one before is what is certain now

    return save


def _megatron(root: str) -> Callable[[int, dict[str, Any]], int]:
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


MODES: dict[str, Callable[[str], Callable[[int, dict[str, Any]], int]]] = {
    "sync": _sync,
    "async": _background,
    "megatron": _megatron,
}


def _saves_until_killed(
    mode: str, rank: int, where: dict[str, str], root: str, done: Any
) -> None:
    """Saves and saves; `done` gets the iteration that is certain to be there. Exit status 3: a
    save failed."""
    end_with_parent()
    torch.set_num_threads(1)
    os.environ.update(where, RANK=str(rank))
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    save = MODES[mode](root)
    try:
        for iteration in range(10, 10_000, 10):
            done.value = max(save(iteration, _state(rank, RANKS, iteration)), done.value)
    except RuntimeError:
        os._exit(3)


def _kill(mode: str, number: int, root: Path) -> str:
    """One trial; what the kill left: "during" a save or "between" two."""
    with rendezvous(RANKS) as where:
        return _kill_at(where, mode, number, root)


def _kill_at(where: dict[str, str], mode: str, number: int, root: Path) -> str:
    chance = random.Random(f"{mode}{number}")
    victims = VICTIMS[number % len(VICTIMS)]
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    # Without a lock, which whoever is killed might hold for ever.
    done = [context.Value("i", 0, lock=False) for _ in range(RANKS)]
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
    _check(root, certain)
    return "during" if folders.half_written(root) else "between"


def _check(root: Path, certain: int) -> None:
    """The newest checkpoint is no older than what had been confirmed, intact, and loads."""
    target = _state(0, 1, -1)
    iteration, loaded = load_checkpoint(root, target)
    assert iteration >= certain >= 20
    assert loaded["number"] == iteration
    for name, tensor in loaded["model"].items():
        assert bool((tensor._local_tensor == iteration).all()), name
    assert verify.examine(folders.final_folder(root, iteration))["intact"]


def _goes_on(root: Path) -> None:
    """The next save after a kill works, and removes what the kill left."""
    newest = folders.read_tracker(root)
    save_checkpoint(root, newest + 100, _state(0, 1, 7))
    assert folders.half_written(root) == ()
    assert load_checkpoint(root, _state(0, 1, -1))[1]["number"] == 7


@pytest.mark.parametrize("mode", MODES)
def test_a_kill_at_any_moment_loses_nothing(one_rank: None, tmp_path: Path, mode: str) -> None:
    """Each trial: a run of two processes, killed in its third save or later."""
    for number in range(2):
        _kill(mode, number, tmp_path / f"{number}")
    _goes_on(tmp_path / "0")


@pytest.mark.full
@pytest.mark.parametrize("mode", MODES)
def test_20_kills_in_the_middle_of_a_save_lose_nothing(
    one_rank: None, tmp_path: Path, mode: str
) -> None:
    """As many trials as it takes until 20 of them left half a save; the others count too."""
    found: list[str] = []
    while found.count("during") < 20:
        assert len(found) < 120, found
        found.append(_kill(mode, len(found), tmp_path / f"{len(found)}"))
        if len(found) % 5 == 1:
            _goes_on(tmp_path / f"{len(found) - 1}")
    print(f"{mode}: 20 of {len(found)} kills hit a save")


def test_without_our_writer_a_kill_does_lose_the_name(tmp_path: Path, one_rank: None) -> None:
    """What is prevented: torch's writer leaves half a checkpoint under its final name."""
    folder = folders.final_folder(tmp_path, 10)

    class Dies(torch_dcp.FileSystemWriter):
        def finish(self, **results: Any) -> None:
            raise OSError("killed")

    with pytest.raises(torch_dcp.CheckpointException, match="killed"):
        torch_dcp.save(_state(0, 1, 1), storage_writer=Dies(folder))
    assert folder.is_dir() and folders.half_written(tmp_path) == (folder.name,)
