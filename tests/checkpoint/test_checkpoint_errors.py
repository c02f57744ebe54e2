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

from megatron_fsdp_adapter.checkpoint import (
    AsyncSaver,
    CheckpointError,
    atomic,
    folders,
    publishing,
    running,
    storage,
)
from megatron_fsdp_adapter.checkpoint.coordination import coordination
from megatron_fsdp_adapter.checkpoint.dcp import (
    latest_iteration,
    load_checkpoint,
    save_checkpoint,
)
from megatron_fsdp_adapter.checkpoint.state import PerRank
from megatron_fsdp_adapter.core.problems import RefusedByAllRanks
from tests.lib.checkpoint.checkpoint_cases import data_mesh, names, plan, same, sharded_tensors
from tests.lib.checkpoint.convert_cases import Evil
from tests.lib.ranks.launch import run_ranks

CHECKS = (
    "checkpoint/coordination.py",
    "checkpoint/dcp.py",
    "checkpoint/state.py",
    "checkpoint/folders.py",
    "checkpoint/publishing.py",
    "checkpoint/atomic.py",
)


def _state(number: float = 1.0) -> dict[str, Any]:
    tensors = {"w": torch.full((4,), number), "b": torch.full((2, 3), number)}
    return {"model": tensors, "step": 1}


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
    root = tmp_path / "root"
    call = {"iteration": 1, "state": _state(), "keep_last": None, **arguments}
    with pytest.raises(ValueError, match=named):
        save_checkpoint(root, **call)
    assert not root.exists()

    root.write_text("")
    with pytest.raises(ValueError, match=r"root is a file"):
        save_checkpoint(root, 1, _state())


def test_without_a_process_group(tmp_path: Path) -> None:
    for call in (functools.partial(save_checkpoint, tmp_path, 1, _state()), AsyncSaver):
        with pytest.raises(ValueError, match="init_process_group"):
            call()


def test_a_sharded_dtensor_without_chunks_is_refused(one_rank: None, tmp_path: Path) -> None:
    # Torch would split five rows otherwise, so that these are unknown.
    tensor = DTensor.from_local(
        torch.zeros(4), data_mesh(1), [Shard(0)], run_check=False, shape=(5,), stride=(1,)
    )
    state = {"model": {"w": tensor}}
    message = r"model.w: a sharded DTensor that carries no chunks"
    with pytest.raises(ValueError, match=message):
        save_checkpoint(tmp_path, 1, state)
    save_checkpoint(tmp_path, 1, {"model": {"w": torch.zeros(4)}})
    with pytest.raises(ValueError, match=message):
        load_checkpoint(tmp_path, state)


def test_one_error_lists_every_difference(one_rank: None, tmp_path: Path) -> None:
    state = _state()
    state["as_tensor"] = 1
    state["as_object"] = torch.ones(1)
    save_checkpoint(tmp_path, 1, state)

    weight = torch.zeros(5)
    also_new = torch.zeros(2)
    target = {
        "model": {"w": weight, "b": torch.zeros(2, 3, dtype=torch.float64), "new": 1},
        "also_new": also_new,
        "as_tensor": torch.tensor(1),
        "as_object": 3.0,
    }
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
    assert bool((also_new == 0).all())
    assert bool((weight == 0).all())


def test_keep_last(one_rank: None, tmp_path: Path) -> None:
    for iteration in (1, 2, 3, 4):
        save_checkpoint(tmp_path, iteration, _state(float(iteration)), keep_last=2)
    assert folders.complete_iterations(tmp_path) == (3, 4)
    # Going back: what is newer than the one just saved is not for us to delete.
    save_checkpoint(tmp_path, 3, _state(30.0), keep_last=1)
    assert folders.complete_iterations(tmp_path) == (3, 4)
    assert latest_iteration(tmp_path) == 3
    _, loaded = load_checkpoint(tmp_path, _state())
    assert loaded["model"]["w"][0] == 30.0


@pytest.fixture
def replaced(one_rank: None, tmp_path: Path) -> Path:
    """A root as a save of iteration 2 leaves it that is killed between its renames."""
    save_checkpoint(tmp_path, 2, _state(2.0))
    folder = folders.final_folder(tmp_path, 2)
    folder.rename(folders.replaced_name(folder))
    atomic.fresh_name(folder).mkdir()
    return tmp_path


def test_a_save_killed_between_its_renames_leaves_the_old_one(replaced: Path) -> None:
    root = replaced
    _, loaded = load_checkpoint(root, _state())
    assert same(loaded, _state(2.0))

    # As far as the next save gets if it is killed too.
    running.end(publishing.prepare_folder(folders.final_folder(root, 2)))
    _, loaded = load_checkpoint(root, _state())
    assert same(loaded, _state(2.0))

    save_checkpoint(root, 2, _state(5.0))
    assert names(root) == ["iter_0000002", folders.TRACKER]
    _, loaded = load_checkpoint(root, _state())
    assert same(loaded, _state(5.0))


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
        _, loaded = load_checkpoint(root, _state(), iteration=2)
        assert same(loaded, _state(2.0))


def test_everything_is_on_disk_before_it_gets_its_name(
    one_rank: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    fsync = os.fsync
    rename = os.rename

    def without_nonce(path: Any) -> str:
        name = os.path.basename(path)
        return re.sub(r"(\.[0-9a-f]{8}-\d+)?\.[0-9a-f]{8}$", "", name)

    def synced(descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        events.append(without_nonce(path))
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


def _raises(kind: type[Exception]) -> None:
    """What a step may do."""
    raise kind("no")


def _errors_on_two_ranks(rank: int, size: int, work: str) -> None:
    layout = plan(size)
    mesh = data_mesh(size)
    tensors = sharded_tensors(layout, rank, mesh, torch.float32)
    save_checkpoint(f"{work}/a", 1, {"model": tensors, "rng": PerRank(rank)})

    # One rank alone wants another shape, another alone a key that is not there.
    saved = f"{work}/a"
    if rank == 1:
        wrong = torch.zeros(3)
    else:
        wrong = torch.zeros(2)
    poisoned = sharded_tensors(layout, rank, mesh, torch.float32, poison=True)
    target = {"model": dict(poisoned), "rng": PerRank(), f"extra_{rank}": wrong}
    with pytest.raises(ValueError) as error:
        load_checkpoint(saved, target)
    message = str(error.value)
    assert "extra_0" in message
    assert "extra_1" in message
    assert same(target["model"], sharded_tensors(layout, rank, mesh, torch.float32, poison=True))

    # A key that one rank wants is not unexpected on the other.
    wanted = {}
    for number, (name, tensor) in enumerate(poisoned.items()):
        if number % 2 == rank:
            wanted[name] = tensor
    partial = {"rng": PerRank(), "model": wanted}
    _, loaded = load_checkpoint(saved, partial)
    assert loaded["rng"] == rank
    for name in wanted:
        assert same(loaded["model"][name], tensors[name])
    del wanted["norm" if rank == 1 else "embedding"]
    with pytest.raises(ValueError, match=r"not in the state \(2\)") as error:
        load_checkpoint(saved, partial)
    message = str(error.value)
    assert "model.norm" in message
    assert "model.embedding" in message

    # What is in the place of a value that is loaded is not pickled.
    lock = threading.Lock()
    _, loaded = load_checkpoint(saved, {"model": poisoned, "rng": PerRank(lock)})
    assert loaded["rng"] == rank

    # A state that only one rank cannot save.
    key = 1 if rank == 1 else "1"
    with pytest.raises(ValueError, match="rank 1: the state cannot be saved"):
        save_checkpoint(saved, 2, {"model": tensors, "bad": {key: 2}})
    with pytest.raises(ValueError, match="ranks disagree"):
        save_checkpoint(saved, 2 + rank, {"model": tensors})

    # A value that one rank cannot pickle, or that cannot be unpickled there.
    locked = {"model": tensors, "rng": PerRank(lock if rank == 1 else 0)}
    with pytest.raises(CheckpointError, match="rank 1: TypeError: cannot pickle '_thread.lock'"):
        save_checkpoint(saved, 2, locked)
    evil = f"{work}/c"
    save_checkpoint(evil, 1, {"rng": PerRank(Evil(_made, rank == 1))})
    with pytest.raises(CheckpointError, match="rank 1: ImportError: gone"):
        load_checkpoint(evil, {"rng": PerRank()})

    # A rank that does not see the folder, as with a root that is not shared.
    seen = saved if rank == 0 else f"{work}/local"
    with pytest.raises(FileNotFoundError, match=r"rank 1: .*local does not exist"):
        load_checkpoint(seen, {"model": poisoned, "rng": PerRank()})

    # A fault of code on one of them needs a traceback, so it is no refusal.
    with coordination() as ranks:
        for kind in (RefusedByAllRanks, ValueError):
            own = RefusedByAllRanks if rank == 0 else kind
            with pytest.raises(kind) as error:
                ranks.run("stage", functools.partial(_raises, own))
            assert type(error.value) is kind
            assert "no" in str(error.value)

    # Overlapping chunks: two ranks claim the same rows.
    both = sharded_tensors(layout, 0, mesh, torch.float32)
    both["x"] = tensors["fc"]
    with pytest.raises(RuntimeError, match="Failed to validate global plan"):
        save_checkpoint(f"{work}/b", 1, {"model": both})

    with AsyncSaver() as saver, pytest.raises(CheckpointError, match="'_thread.lock'"):
        saver.save(saved, 2, locked)
    assert latest_iteration(saved) == 1
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

    def backends(group: dist.ProcessGroup) -> Any:
        if group is default:
            return "cuda:nccl"
        return real(group)

    monkeypatch.setattr(dist, "get_backend_config", backends)
    with coordination() as ranks:
        made = ranks.group
        assert made is not default
        assert ranks.size == 1
        found = ranks.run("stage", lambda: 7, share=lambda n: n + 1)
        assert found == (7, (8,))
    monkeypatch.undo()
    with pytest.raises(ValueError, match="not initialized"):
        dist.get_backend(made)
