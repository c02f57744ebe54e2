"""Saves in the background: what they save, what they cost, and how they fail."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._pytree import tree_leaves

from megatron_fsdp_adapter.checkpoint import AsyncSaver, PerRank, folders
from megatron_fsdp_adapter.checkpoint.asynchronous import host_copy
from megatron_fsdp_adapter.checkpoint.dcp import (
    latest_iteration,
    load_checkpoint,
    save_checkpoint,
)
from tests.lib.checkpoint.checkpoint_cases import (
    Gate,
    collectives_called,
    data_mesh,
    names,
    nested_state,
    numbered_state,
    same,
)
from tests.lib.ranks.launch import run_ranks

CHECKS = ("checkpoint/asynchronous.py", "checkpoint/dcp.py", "checkpoint/storage.py")


def _change(state: dict[str, Any]) -> None:
    """Everything that training changes, in place."""
    for leaf in tree_leaves(state):
        if isinstance(leaf, torch.Tensor):
            getattr(leaf, "_local_tensor", leaf).zero_()
    state["schedule"]["history"].append(9)
    state["schedule"]["pair"][0].append(9)


def _full_state(rank: int, size: int, poison: bool = False) -> dict[str, Any]:
    state = nested_state(rank, size, poison)
    local = torch.full((3, 2), -1.0 if poison else 5.0)
    state["model"]["replicated"] = DTensor.from_local(local, data_mesh(size), [Replicate()])
    state["schedule"] = {"history": [1, 2], "pair": ([3], 4)}  # a tuple is one object to DCP
    state["rng"] = PerRank(rank)
    state["deep"] = {"er": [{"own": PerRank(-rank), "t": torch.ones(1)}]}
    return state


def _what_was_there_when_the_call_returned(rank: int, size: int, work: str) -> None:
    with AsyncSaver() as saver:
        for cut in (0, 1):
            gate = Gate()
            root = f"{work}/{cut}"
            state = _full_state(rank, size)
            saver.save(root, 10, state)
            _change(state)
            assert saver.busy
            assert gate.reached.wait(60)
            assert not Path(root, "iter_0000010").exists()
            # The group of training is free meanwhile.
            total = torch.tensor([rank])
            dist.all_reduce(total)
            assert int(total) == size * (size - 1) // 2
            gate.opened.set()
            saver.wait()
            assert not saver.busy
            save_checkpoint(f"{work}/sync{cut}", 10, _full_state(rank, size))
            for found in (root, f"{work}/sync{cut}"):
                target = _full_state(rank, size, poison=True)
                target["schedule"] = {"history": [], "pair": ()}
                iteration, loaded = load_checkpoint(found, target)
                assert iteration == 10
                expected = {**_full_state(rank, size), "rng": rank}
                expected["deep"] = {"er": [{"own": -rank, "t": torch.ones(1)}]}
                assert same(loaded, expected)
        files = []
        for f in (f"{work}/1", f"{work}/sync1"):
            files.append(
                {p.name: p.stat().st_size for p in Path(f, "iter_0000010").glob("*.distcp")}
            )
        assert files[0] == files[1]


def test_what_is_saved_is_what_was_there_when_the_call_returned(tmp_path: Path) -> None:
    run_ranks(_what_was_there_when_the_call_returned, 2, str(tmp_path))


def _nothing_of_training_is_used(rank: int, size: int, work: str) -> None:
    with AsyncSaver() as saver, collectives_called() as called:
        saver.save(work, 1, _full_state(rank, size))
        saver.wait()
        assert called, called
        assert not any(of_training for _, of_training in called), called
        dist.barrier()
        assert called[-1] == ("barrier", True), "the test sees nothing"
        # Bad arguments of one rank raise at once, on all.
        if rank == 0:
            state = _full_state(rank, size)
        else:
            state = {"model": {1: 2}}
        with pytest.raises(ValueError, match="keys must be strings"):
            saver.save(work, 4, state)
        assert not saver.busy
        saver.save(work, 4, numbered_state(rank, size, 4.0), keep_last=1)
    assert load_checkpoint(work, numbered_state(rank, size, 0.0))[0] == 4
    assert names(work) == ["iter_0000004", folders.TRACKER]
    # An error of training does not lose the save that is under way.
    with pytest.raises(RuntimeError, match="training failed"), AsyncSaver() as saver:
        saver.save(work, 5, numbered_state(rank, size, 1.0))
        raise RuntimeError("training failed")
    assert not saver.busy
    assert latest_iteration(work) == 5


def test_nothing_is_exchanged_on_the_group_of_training_and_errors_are_of_all(
    tmp_path: Path,
) -> None:
    run_ranks(_nothing_of_training_is_used, 2, str(tmp_path))


SILENT = """
import sys
from torch import distributed
from megatron_fsdp_adapter.checkpoint import AsyncSaver, asynchronous
write = asynchronous._write
def once_asked(*given):
    given[-1].wait(60)
    write(*given)
if sys.argv[2] == "asks":  # else the thread may fail before the program waits
    asynchronous._write = once_asked
distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
saver = AsyncSaver()
saver.save(sys.argv[1], 1, {"cannot be pickled": lambda: 1})
if sys.argv[2] == "asks":
    try:
        saver.close()
    except RuntimeError:
        pass
"""


@pytest.mark.parametrize(("asks", "told"), [("asks", 0), ("does not", 1)])
def test_a_failure_that_nothing_waits_for_is_told(tmp_path: Path, asks: str, told: int) -> None:
    command = [sys.executable, "-W", "ignore", "-c", SILENT, str(tmp_path), asks]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    line = "iter_0000001: the save in the background failed (rank 0: "
    assert done.stderr.count(line) == done.stderr.count("<lambda> on __main__ failed") == told


def test_a_closed_saver_leaves_its_process_group_to_no_garbage_collection(
    one_rank: None, tmp_path: Path
) -> None:
    """Its threads are joined when it is freed, which hangs in a process that was forked since."""
    gc.disable()
    try:
        saver = AsyncSaver()
        saver.save(tmp_path, 1, numbered_state(0, 1, 1.0))
        saver.close()
        ranks = weakref.ref(saver.ranks)
        del saver
        assert ranks() is None
    finally:
        gc.enable()


def test_the_copy_is_one_and_is_used_again(one_rank: None) -> None:
    buffers: dict[str, torch.Tensor] = {}
    state = nested_state(0, 1)
    name = "module.float32.fc"
    first = host_copy(state, buffers)
    held = {path: buffer.data_ptr() for path, buffer in buffers.items()}
    local = state["model"][name]._local_tensor.fill_(7)
    second = host_copy(state, buffers)
    assert {path: buffer.data_ptr() for path, buffer in buffers.items()} == held
    assert second["model"][name].data_ptr() == first["model"][name].data_ptr() != local.data_ptr()
    assert torch.equal(second["model"][name].view_as(local), local)
    del state["optimizer"]
    host_copy(state, buffers)
    for path in buffers:
        assert path.startswith("model."), "more than one copy"
