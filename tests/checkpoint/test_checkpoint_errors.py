"""Bad input is one clear error, on every rank, before a tensor is touched."""

from __future__ import annotations

import functools
import os
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import checkpoint as torch_dcp
from torch.distributed.tensor import DTensor, Shard

from megatron_fsdp_adapter.checkpoint import AsyncSaver, CheckpointError, folders, storage
from megatron_fsdp_adapter.checkpoint.coordination import coordination
from megatron_fsdp_adapter.checkpoint.dcp import (
    latest_iteration,
    load_checkpoint,
    save_checkpoint,
)
from megatron_fsdp_adapter.checkpoint.state import PerRank
from tests.lib.checkpoint.checkpoint_cases import data_mesh, names, plan, same, sharded_tensors
from tests.lib.checkpoint.convert_cases import Evil
from tests.lib.ranks.launch import run_ranks

CHECKS = (
    "checkpoint/coordination.py",
    "checkpoint/dcp.py",
    "checkpoint/state.py",
    "checkpoint/folders.py",
)


def _state(number: float = 1.0) -> dict[str, Any]:
    return {"model": {"w": torch.full((4,), number), "b": torch.full((2, 3), number)}, "step": 1}


def test_missing_root(one_rank: None, tmp_path: Path) -> None:
    load = functools.partial(load_checkpoint, state=_state())
    for call in (load, functools.partial(load, iteration=3), latest_iteration):
        with pytest.raises(FileNotFoundError, match="nowhere does not exist"):
            call(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"iteration": -1}, "iteration=-1"),
        ({"iteration": 1.5}, "iteration=1.5"),
        ({"iteration": True}, "iteration=True"),
        ({"keep_last": 0}, "keep_last=0"),
        ({"state": {"a": {1: 2}}}, "a.1: keys must be strings"),
        ({"state": {"a": torch.empty(2, device="meta")}}, "a: a tensor on the meta device"),
        ({"state": {"a.b": 1, "a": {"b": 2}}}, "a.b"),
    ],
)
def test_bad_arguments_to_save(
    one_rank: None, tmp_path: Path, arguments: dict[str, Any], named: str
) -> None:
    call = {"iteration": 1, "state": _state(), "keep_last": None, **arguments}
    with pytest.raises(ValueError, match=named):
        save_checkpoint(tmp_path / "root", **call)
    assert not (tmp_path / "root").exists()
    (tmp_path / "root").write_text("")
    with pytest.raises(ValueError, match=r"root is a file"):
        save_checkpoint(tmp_path / "root", 1, _state())


def test_without_a_process_group(tmp_path: Path) -> None:
    for call in (functools.partial(save_checkpoint, tmp_path, 1, _state()), AsyncSaver):
        with pytest.raises(ValueError, match="init_process_group"):
            call()


def test_a_sharded_dtensor_without_chunks_is_refused(one_rank: None, tmp_path: Path) -> None:
    tensor = DTensor.from_local(torch.zeros(4), data_mesh(1), [Shard(0)])
    with pytest.raises(ValueError, match=r"model.w: a sharded DTensor that carries no chunks"):
        save_checkpoint(tmp_path, 1, {"model": {"w": tensor}})
    save_checkpoint(tmp_path, 1, {"model": {"w": torch.zeros(4)}})
    with pytest.raises(ValueError, match=r"model.w: a sharded DTensor that carries no chunks"):
        load_checkpoint(tmp_path, {"model": {"w": tensor}})


def test_one_error_lists_every_difference(one_rank: None, tmp_path: Path) -> None:
    beside = {"as_tensor": 1, "as_object": torch.ones(1)}
    save_checkpoint(tmp_path, 1, {**_state(), **beside})
    target = {
        "model": {"w": torch.zeros(5), "b": torch.zeros(2, 3, dtype=torch.float64), "new": 1},
        "also_new": torch.zeros(2), "as_tensor": torch.tensor(1), "as_object": 3.0,
    }  # fmt: skip
    with pytest.raises(ValueError) as error:
        load_checkpoint(tmp_path, target)
    lines = [line.strip() for line in str(error.value).splitlines()]
    assert "missing in the checkpoint (2):" in lines
    assert "model.new" in lines
    assert "also_new" in lines
    assert "in the checkpoint but not in the state (1):" in lines
    assert "step" in lines
    assert "model.w: stored with shape (4,), wanted with (5,)" in lines
    assert "model.b: stored as torch.float32, wanted as torch.float64" in lines
    for key, kind in (("as_tensor", "an object"), ("as_object", "a tensor")):
        assert any(line.startswith(f"{key}: stored as {kind}") for line in lines), lines
    assert bool((target["also_new"] == 0).all())
    assert bool((target["model"]["w"] == 0).all())


def test_keep_last(one_rank: None, tmp_path: Path) -> None:
    for iteration in (1, 2, 3, 4):
        save_checkpoint(tmp_path, iteration, _state(float(iteration)), keep_last=2)
    assert folders.complete_iterations(tmp_path) == (3, 4)
    # Going back: what is newer than the one just saved is not for us to delete.
    save_checkpoint(tmp_path, 3, _state(30.0), keep_last=1)
    assert folders.complete_iterations(tmp_path) == (3, 4)
    assert latest_iteration(tmp_path) == 3
    assert load_checkpoint(tmp_path, _state())[1]["model"]["w"][0] == 30.0


@pytest.fixture
def replaced(one_rank: None, tmp_path: Path) -> Path:
    """A root as a save of iteration 2 leaves it that is killed between its renames."""
    save_checkpoint(tmp_path, 2, _state(2.0))
    folder = folders.final_folder(tmp_path, 2)
    folder.rename(folders.replaced_name(folder))
    folders.fresh_name(folder).mkdir()
    return tmp_path


def test_a_save_killed_between_its_renames_leaves_the_old_one(replaced: Path) -> None:
    root = replaced
    assert same(load_checkpoint(root, _state())[1], _state(2.0))
    # As far as the next save gets if it is killed too.
    folders.prepare_folder(folders.final_folder(root, 2))
    assert same(load_checkpoint(root, _state())[1], _state(2.0))
    save_checkpoint(root, 2, _state(5.0))
    assert names(root) == ["iter_0000002", folders.TRACKER]
    assert same(load_checkpoint(root, _state())[1], _state(5.0))


@pytest.mark.parametrize("by_megatron", [False, True])
@pytest.mark.parametrize("keep", [None, 2, 1])
def test_a_checkpoint_under_its_replaced_name_is_kept_by_saves_of_later_iterations(
    replaced: Path, by_megatron: bool, keep: int | None
) -> None:
    """It is complete, and `keep_last` counts it as any other."""
    root = replaced
    if by_megatron:
        writer = storage.SafeWriter(folders.final_folder(root, 3))
        torch_dcp.save(_state(3.0), storage_writer=writer)
        keep = None
    else:
        save_checkpoint(root, 3, _state(3.0), keep_last=keep)
    if keep == 1:
        kept = ["iter_0000003"]
    else:
        kept = ["iter_0000002", "iter_0000003"]
    assert names(root) == [*kept, folders.TRACKER]
    if keep != 1:
        assert same(load_checkpoint(root, _state(), iteration=2)[1], _state(2.0))


def test_everything_is_on_disk_before_it_gets_its_name(
    one_rank: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    fsync = os.fsync
    rename = os.rename

    def without_nonce(path: Any) -> str:
        return re.sub(r"(\.[0-9a-f]{8}-\d+)?\.[0-9a-f]{8}$", "", os.path.basename(path))

    def synced(descriptor: int) -> None:
        events.append(without_nonce(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def renamed(source: Any, target: Any, **options: Any) -> None:
        events.append(f"-> {without_nonce(target)}")
        rename(source, target, **options)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", renamed)
    monkeypatch.setattr(os, "replace", renamed)
    save_checkpoint(tmp_path / "root", 1, _state())
    named = events.index("-> iter_0000001")
    before = {"__0_0.distcp", ".metadata", "tmp.iter_0000001", f"tmp.{folders.TRACKER}"}
    assert before <= set(events[:named])
    assert events[named + 1 :] == ["root", f"-> {folders.TRACKER}", "root"]


def _made(breaks: bool) -> None:
    """What unpickling does."""
    if breaks:
        raise ImportError("gone")


def _errors_on_two_ranks(rank: int, size: int, work: str) -> None:
    layout = plan(size)
    mesh = data_mesh(size)
    tensors = sharded_tensors(layout, rank, mesh, torch.float32)
    save_checkpoint(f"{work}/a", 1, {"model": tensors, "rng": PerRank(rank)})

    # One rank alone wants another shape, another alone a key that is not there.
    if rank == 1:
        wrong = torch.zeros(3)
    else:
        wrong = torch.zeros(2)
    poisoned = sharded_tensors(layout, rank, mesh, torch.float32, poison=True)
    target = {"model": dict(poisoned), "rng": PerRank(), f"extra_{rank}": wrong}
    with pytest.raises(ValueError) as error:
        load_checkpoint(f"{work}/a", target)
    assert "extra_0" in str(error.value)
    assert "extra_1" in str(error.value)
    assert same(target["model"], sharded_tensors(layout, rank, mesh, torch.float32, poison=True))

    # A key that one rank wants is not unexpected on the other.
    partial = {"rng": PerRank()}
    partial["model"] = {n: t for i, (n, t) in enumerate(poisoned.items()) if i % 2 == rank}
    _, loaded = load_checkpoint(f"{work}/a", partial)
    assert loaded["rng"] == rank
    for n in partial["model"]:
        assert same(loaded["model"][n], tensors[n])
    del partial["model"]["norm" if rank == 1 else "embedding"]
    with pytest.raises(ValueError, match=r"not in the state \(2\)") as error:
        load_checkpoint(f"{work}/a", partial)
    assert "model.norm" in str(error.value)
    assert "model.embedding" in str(error.value)

    # What is in the place of a value that is loaded is not pickled.
    lock = threading.Lock()
    asked = {"model": poisoned, "rng": PerRank(lock)}
    assert load_checkpoint(f"{work}/a", asked)[1]["rng"] == rank
    save_checkpoint(f"{work}/c", 1, {"rng": PerRank(Evil(_made, rank == 1))})

    locked = {"model": tensors, "rng": PerRank(lock if rank == 1 else 0)}
    both = sharded_tensors(layout, 0, mesh, torch.float32)
    refused: tuple[tuple[type[Exception], str, Any], ...] = (
        # A state that only one rank cannot save.
        (
            ValueError,
            "rank 1: the state cannot be saved",
            lambda: save_checkpoint(
                f"{work}/a", 2, {"model": tensors, "bad": {1: 2} if rank == 1 else {"1": 2}}
            ),
        ),
        (
            ValueError,
            "ranks disagree",
            lambda: save_checkpoint(f"{work}/a", 2 + rank, {"model": tensors}),
        ),
        # A value that one rank cannot pickle, or that cannot be unpickled there.
        (
            CheckpointError,
            "rank 1: TypeError: cannot pickle '_thread.lock'",
            lambda: save_checkpoint(f"{work}/a", 2, locked),
        ),
        (
            CheckpointError,
            "rank 1: ImportError: gone",
            lambda: load_checkpoint(f"{work}/c", {"rng": PerRank()}),
        ),
        # A rank that does not see the folder, as with a root that is not shared.
        (
            FileNotFoundError,
            r"rank 1: .*local does not exist",
            lambda: load_checkpoint(
                f"{work}/{('a', 'local')[rank]}", {"model": poisoned, "rng": PerRank()}
            ),
        ),
        # Overlapping chunks: two ranks claim the same rows.
        (
            RuntimeError,
            "Failed to validate global plan",
            lambda: save_checkpoint(f"{work}/b", 1, {"model": {**both, "x": tensors["fc"]}}),
        ),
    )
    for error_type, match, call in refused:
        with pytest.raises(error_type, match=match):
            call()
    with AsyncSaver() as saver, pytest.raises(CheckpointError, match="'_thread.lock'"):
        saver.save(f"{work}/a", 2, locked)
    assert latest_iteration(f"{work}/a") == 1
    dist.barrier()


def test_errors_reach_every_rank(tmp_path: Path) -> None:
    run_ranks(_errors_on_two_ranks, 2, str(tmp_path))


def test_a_group_without_a_cpu_backend_is_refused(
    one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = dist.new_group([0])
    monkeypatch.setattr(dist, "get_backend_config", lambda _: "cuda:nccl")
    with pytest.raises(ValueError, match="cannot move CPU tensors"), coordination(group):
        pass


def test_a_gloo_group_is_made_where_the_default_has_no_cpu_backend(
    one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = dist.get_backend_config
    default = dist.group.WORLD
    monkeypatch.setattr(
        dist, "get_backend_config", lambda g: "cuda:nccl" if g is default else real(g)
    )
    with coordination() as ranks:
        made = ranks.group
        assert made is not default
        assert ranks.size == 1
        assert ranks.run("stage", lambda: 7, share=lambda n: n + 1) == (7, (8,))
    monkeypatch.undo()
    with pytest.raises(ValueError, match="not initialized"):
        dist.get_backend(made)
