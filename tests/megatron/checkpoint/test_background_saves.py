"""Megatron-LM's asynchronous saves, with its calls in its order around our table."""

from __future__ import annotations

import contextlib
import inspect
import io
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest

from megatron_fsdp_adapter.checkpoint import (
    CheckpointError,
    asynchronous,
    atomic,
    folders,
    load_checkpoint,
)
from megatron_fsdp_adapter.checkpoint.record import read_record
from megatron_fsdp_adapter.megatron.checkpoint import background_saves
from megatron_fsdp_adapter.megatron.compat.table import BRIDGE, SAVES
from megatron_fsdp_adapter.tools.cli import verify
from tests.lib.checkpoint.checkpoint_cases import Gate
from tests.lib.checkpoint.megatron_loop import NAMES, TABLE, Loop, table_of
from tests.lib.megatron.stand_ins import stand_ins
from tests.lib.ranks.launch import run_ranks

CHECKS = ("megatron/checkpoint/background_saves.py", "checkpoint/asynchronous.py")


def _state(value: float) -> dict[str, Any]:
    return {"model": {"w": torch.full((5, 3), value)}, "iteration": int(value)}


def _late(rank: int, loop: Loop) -> None:
    """The tracker names a save once all ranks have written it."""
    gate = Gate()
    state = _state(7.0)
    loop.save(7, state)
    state["model"]["w"].zero_()  # training goes on
    for _ in range(3):
        assert loop.queue.maybe_finalize_async_calls(blocking=False) == []
    assert loop.queue.get_num_unfinalized_calls() == 1
    assert loop.tracked is None
    assert folders.complete_iterations(loop.root) == ()
    dist.barrier()
    if rank == 0:
        gate.opened.set()
    assert loop.queue.maybe_finalize_async_calls(blocking=False) == []
    gate.opened.set()
    while loop.queue.maybe_finalize_async_calls(blocking=False) != [0]:
        pass
    dist.barrier()
    assert loop.tracked == 7
    assert loop.queue.get_num_unfinalized_calls() == 0
    empty = {"model": {"w": torch.zeros(5, 3)}, "iteration": 0}
    iteration, loaded = load_checkpoint(loop.root, empty)
    assert verify.examine(folders.final_folder(loop.root, 7))["intact"]
    assert iteration == loaded["iteration"] == 7
    assert bool((loaded["model"]["w"] == 7).all())
    record = read_record(folders.final_folder(loop.root, 7))
    assert record is not None
    assert (record["world_size"], record["iteration"]) == (2, 7)
    assert record["topology"] == {"tensor_model_parallel_size": 2}
    assert folders.half_written(loop.root) == ()


def _one_after_the_other(rank: int, loop: Loop) -> None:
    """A save that is asked for early would overwrite the copy that is being written; and the
    tracker goes up, never down."""
    for iteration in (1, 2, 3):
        loop.save(iteration, _state(float(iteration)))  # waits for the one before
    assert loop.queue.get_num_unfinalized_calls() == 3
    assert loop.tracked is None
    loop.queue.close()  # what ends a training
    dist.barrier()
    assert loop.tracked == 3
    assert folders.complete_iterations(loop.root) == (1, 2, 3)
    for iteration in (1, 2, 3):
        loaded = load_checkpoint(loop.root, _state(0.0), iteration=iteration)[1]
        assert bool((loaded["model"]["w"] == iteration).all())


def _one_rank_fails(rank: int, loop: Loop) -> None:
    """An error on all ranks, and the tracker names the save before."""
    loop.save(1, _state(1.0))
    loop.queue.maybe_finalize_async_calls(blocking=True)
    Gate(fails=rank == 1).opened.set()
    with contextlib.redirect_stderr(io.StringIO()) as told:
        loop.save(2, _state(2.0))
        while "No space left" not in told.getvalue():  # a loop that ends here would never ask
            time.sleep(0.01)
    assert "iter_0000002: the save in the background failed" in told.getvalue()
    assert "rank 1: OSError: [Errno 28] No space left on device" in told.getvalue()
    with pytest.raises(CheckpointError, match="No space left on device"):
        loop.queue.maybe_finalize_async_calls(blocking=True)
    dist.barrier()
    assert loop.tracked == 1
    assert folders.complete_iterations(loop.root) == (1,)
    assert not list(loop.root.glob(f"{atomic.TEMPORARY}*"))


RANK_CHECKS = (_late, _one_after_the_other, _one_rank_fails)


def _all(rank: int, size: int, root: str) -> None:
    for check in RANK_CHECKS:
        folder = Path(root, check.__name__)
        folder.mkdir(exist_ok=True)
        with stand_ins(NAMES, SAVES) as modules:
            check(rank, Loop(folder, modules))
            dist.barrier()


def test_a_save_is_tracked_once_all_ranks_have_written_it_and_never_if_one_has_failed(
    tmp_path: Path,
) -> None:
    """One start of ranks runs all of `RANK_CHECKS`; a failure has the check in its traceback."""
    run_ranks(_all, 2, str(tmp_path))


def test_a_request_that_is_no_save_is_done_before_its_functions_are_called() -> None:
    """A teacher's logits (0.19) are queued behind the checkpoint, with its functions."""
    seen: list[str] = []
    queue = background_saves.SaveQueue()
    queue.schedule_async_request(AsyncRequest(None, (), []))
    tell = [lambda: seen.append("both")]
    queue.schedule_async_request(AsyncRequest(seen.append, ("logits",), tell, {}))
    assert seen == ["logits"]
    assert queue.maybe_finalize_async_calls() == [0, 1]
    assert seen == ["logits", "both"]


def test_what_megatron_asks_of_signatures_is_there() -> None:
    """It passes some arguments only to what takes them, or refuses to go on."""
    for function, names in (
        (background_saves.Target.__init__, {"use_cpu_shm_for_gpu_tensors"}),
        (background_saves.SaveQueue.__init__, {"cpu_shm_mode"}),
        (
            background_saves.SaveQueue.warmup_persistent_caller,
            {"cpu_shm_mode", "mp_mode", "cpu_priority", "io_priority"},
        ),
        (background_saves._no_results, {"mp_mode"}),
    ):
        assert names <= set(inspect.signature(function).parameters), function


def test_an_address_is_refused() -> None:
    with pytest.raises(ValueError, match="msc://bucket/iter_0000001: .*Leave async_save out"):
        background_saves.Target("msc://bucket/iter_0000001")


def test_what_bridge_takes_by_name_is_ours() -> None:
    state = "megatron.bridge.training.state"
    names = (
        "FileSystemWriterAsync",
        "save_state_dict_async_plan",
        "save_state_dict_async_finalize",
    )
    of_saving = {"torch": torch, "HAVE_NVRX": True, **dict.fromkeys(names, table_of)}
    with stand_ins({BRIDGE: of_saving, state: TABLE}, SAVES) as made:
        writer, plan, finish = (vars(made[BRIDGE])[name] for name in names)
        assert writer is background_saves.Target
        assert plan.__func__ is background_saves.AsyncStrategy.plan
        assert finish is asynchronous.Writing.finish
        _, table = made[state].get_async_strategy("nvrx")
        assert table["AsyncCallsQueue"] is background_saves.SaveQueue
