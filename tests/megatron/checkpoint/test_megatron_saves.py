"""What Megatron's checkpointing modules see instead of torch's writer and `open`."""

from __future__ import annotations

import builtins
import json
import shutil
import types
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_fsdp_adapter.checkpoint import atomic, digests, folders, load_checkpoint, record
from megatron_fsdp_adapter.checkpoint.unpickling import Reader
from megatron_fsdp_adapter.megatron.checkpoint import megatron_saves
from megatron_fsdp_adapter.megatron.compat.table import BRIDGE, LM, SAVES
from megatron_fsdp_adapter.tools.cli import verify
from tests.lib.megatron.stand_ins import opener_of, save_as_megatron, stand_ins

CHECKS = ("megatron/checkpoint/megatron_saves.py",)


class StorageClient:
    """`maybe_msc` of 0.19: answers names of Python's own until a client is enabled."""

    opens: Any = staticmethod(open)

    @property
    def open(self) -> Any:
        return self.opens


OPENERS = {"open_file": open, "maybe_msc": StorageClient()}
"""The global by which Megatron-LM opens the tracker: until 0.18, and from 0.19 on."""


@pytest.fixture(params=OPENERS)
def modules(request: pytest.FixtureRequest) -> Iterator[dict[str, types.ModuleType]]:
    """Stand-ins with the globals that the real modules have."""
    common = {"torch": torch, "shutil": shutil}
    arguments = SimpleNamespace(tensor_model_parallel_size=2, outer_dp_sharding_strategy=None)
    own = {"get_args": lambda: arguments, request.param: OPENERS[request.param]}
    with stand_ins({LM: {**common, **own}, BRIDGE: common}, SAVES) as made:
        yield made


@pytest.mark.parametrize("name", [LM, BRIDGE])
def test_a_save_as_megatron_does_it(
    modules: dict[str, types.ModuleType], alone: None, tmp_path: Path, name: str
) -> None:
    module = modules[name]
    root = tmp_path / "root"
    for iteration in (1, 2, 2):
        save_as_megatron(module, root, iteration, {"w": torch.full((4,), float(iteration))})
    folder = folders.final_folder(root, 2)
    assert sorted(path.name for path in root.iterdir()) == [
        "iter_0000001",
        "iter_0000002",
        folders.TRACKER,
    ]
    iteration, loaded = load_checkpoint(root, {"w": torch.zeros(4)})
    assert verify.examine(folder)["intact"]
    assert iteration == 2
    assert bool((loaded["w"] == 2).all())
    found = record.read_record(folder)
    assert found is not None
    assert found["iteration"] == 2
    assert found["topology"] == ({"tensor_model_parallel_size": 2} if name == LM else {})
    # A newer format is named there too.
    reader = module.torch.distributed.checkpoint.FileSystemReader(str(folder))
    assert type(reader) is Reader
    path = folder / record.RECORD
    path.write_text(json.dumps({**json.loads(path.read_text()), "format_version": 9}))
    with pytest.raises(ValueError, match="format version 9"):
        module.torch.distributed.checkpoint.FileSystemReader(str(folder))


def test_a_save_that_fails_leaves_no_half_under_the_name(
    modules: dict[str, types.ModuleType],
    alone: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = folders.final_folder(tmp_path, 5)
    folder.mkdir()
    checkpoint = modules[LM].torch.distributed.checkpoint

    fails = mock.Mock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setattr(digests, "write_digests", fails)
    with pytest.raises(torch.distributed.checkpoint.CheckpointException, match="No space left"):
        checkpoint.save({"w": torch.ones(3)}, storage_writer=checkpoint.FileSystemWriter(folder))
    assert list(folder.iterdir()) == []
    # The empty folder is Megatron's; what was written into another is gone.
    assert [path.name for path in tmp_path.glob("*iter*")] == ["iter_0000005"]
    monkeypatch.undo()
    following = folders.final_folder(tmp_path, 6)
    checkpoint.save({"w": torch.ones(3)}, storage_writer=checkpoint.FileSystemWriter(following))
    assert sorted(path.name for path in tmp_path.glob("*iter*")) == ["iter_0000006"]


killed = mock.Mock(side_effect=RuntimeError("killed"))


def test_a_tracker_is_replaced_as_a_whole(
    modules: dict[str, types.ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker = tmp_path / folders.TRACKER
    other = tmp_path / "other.txt"
    tracker.write_text("5")
    open_file = opener_of(modules[LM])
    with open_file(tracker, "w") as file:
        file.write("6")
        assert tracker.read_text() == "5"
    assert tracker.read_text() == "6"
    assert open_file(tracker).read() == "6"
    with pytest.raises(RuntimeError), open_file(tracker, "w") as file:
        file.write("7")
        raise RuntimeError
    assert tracker.read_text() == "6"
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="killed"):
        patch.setattr(atomic.os, "fsync", killed)
        with open_file(tracker, "w") as file:
            file.write("8")
    assert tracker.read_text() == "6", "it is not written before its text is on disk"
    with open_file(other, "w") as file:
        assert not isinstance(file, megatron_saves.ReplacingFile)
    assert modules[BRIDGE].open is not builtins.open
    assert sorted(path.name for path in tmp_path.iterdir()) == [folders.TRACKER, "other.txt"]


@pytest.mark.parametrize("modules", ["maybe_msc"], indirect=True)
def test_a_storage_client_that_is_enabled_later_is_the_one_that_is_asked(
    modules: dict[str, types.ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StorageClient, "opens", staticmethod(lambda *args: args))
    assert modules[LM].maybe_msc.open("msc://x", "r") == ("msc://x", "r")


def test_bridges_train_state_is_replaced_as_a_whole(
    modules: dict[str, types.ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "train_state.pt"
    target = tmp_path / "latest_train_state.pt"
    source.write_text("new"), target.write_text("old")
    copy = modules[BRIDGE].shutil.copy
    assert modules[BRIDGE].shutil.move is shutil.move

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="killed"):
        patch.setattr(atomic, "sync_files", killed)
        copy(source, target)
    assert target.read_text() == "old"
    copy(str(source), str(target))
    assert target.read_text() == "new"
    (tmp_path / "folder").mkdir()
    copy(source, tmp_path / "folder")
    assert (tmp_path / "folder" / "train_state.pt").read_text() == "new"


def _counts_all(save_dir: str, leave_ckpt_num: int = 1, do_async: bool = False) -> None:
    """As Megatron's `cleanup_old_non_persistent_checkpoint`, with its parameters."""
    raise AssertionError(save_dir)


def _counts_up_to(
    save_dir: str,
    leave_ckpt_num: int = 1,
    do_async: bool = False,
    *,
    max_iteration: int | None = None,
) -> None:
    """As in Megatron-Bridge 0.6.2."""
    raise AssertionError(save_dir)


def test_checkpoints_behind_a_given_iteration_are_left(alone: None, tmp_path: Path) -> None:
    common = {"torch": torch, "shutil": shutil, "open_file": open}
    common["cleanup_old_non_persistent_checkpoint"] = _counts_up_to
    with stand_ins({BRIDGE: common}, SAVES) as modules:
        for iteration in (1, 2, 3):
            save_as_megatron(modules[BRIDGE], tmp_path, iteration, {"w": torch.ones(4)})
        modules[BRIDGE].cleanup_old_non_persistent_checkpoint(
            str(tmp_path), leave_ckpt_num=1, max_iteration=2
        )
    assert folders.complete_iterations(tmp_path) == (2, 3)


@pytest.mark.parametrize("name", [LM, BRIDGE])
@pytest.mark.parametrize("named", [1, 2, 3])
def test_the_newest_that_are_kept_are_complete(
    alone: None, tmp_path: Path, name: str, named: int
) -> None:
    """named: the iteration that the tracker names. A save of iteration 4 has made its folder."""
    common = {"torch": torch, "shutil": shutil, "open_file": open}
    common["cleanup_old_non_persistent_checkpoint"] = _counts_all
    with stand_ins({name: common}, SAVES) as modules:
        for iteration in (1, 2, 3):
            save_as_megatron(modules[name], tmp_path, iteration, {"w": torch.ones(4)})
        (tmp_path / folders.TRACKER).write_text(str(named))
        folders.final_folder(tmp_path, 4).mkdir()
        modules[name].cleanup_old_non_persistent_checkpoint(str(tmp_path), leave_ckpt_num=1)
    assert folders.complete_iterations(tmp_path) == tuple(sorted({3, named}))
    assert folders.final_folder(tmp_path, 4).is_dir()


def test_a_checkpoint_is_deleted_under_another_name_and_not_if_the_tracker_names_it(
    modules: dict[str, types.ModuleType],
    alone: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for iteration in (1, 2):
        save_as_megatron(modules[LM], tmp_path, iteration, {"w": torch.ones(4)})
    old = folders.final_folder(tmp_path, 1)
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="killed"):
        patch.setattr(shutil, "rmtree", killed)
        modules[LM].shutil.rmtree(str(old))
    assert not old.exists()
    assert [path.name.rpartition(".")[0] for path in tmp_path.glob("tmp.*")] == ["tmp.iter_0000001"]
    with pytest.raises(OSError, match=r"iter_0000002 is kept: latest.*txt names it"):
        modules[LM].shutil.rmtree(str(folders.final_folder(tmp_path, 2)))
    assert folders.complete_iterations(tmp_path) == (2,)


def test_addresses_are_left_to_megatron(
    modules: dict[str, types.ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megatron's storage client has no rename."""
    writer = mock.Mock()
    monkeypatch.setattr(megatron_saves, "FileSystemWriter", writer)
    modules[LM].torch.distributed.checkpoint.FileSystemWriter("msc://bucket/iter_0000001")
    writer.assert_called_once_with("msc://bucket/iter_0000001")
