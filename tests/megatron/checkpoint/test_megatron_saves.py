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

from megatron_fsdp_adapter.checkpoint import digests, folders, load_checkpoint, record
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
        patch.setattr(folders.os, "fsync", killed)
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
    assert modules[BRIDGE].shutil.rmtree is shutil.rmtree

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="killed"):
        patch.setattr(folders, "sync_files", killed)
        copy(source, target)
    assert target.read_text() == "old"
    copy(str(source), str(target))
    assert target.read_text() == "new"
    (tmp_path / "folder").mkdir()
    copy(source, tmp_path / "folder")
    assert (tmp_path / "folder" / "train_state.pt").read_text() == "new"


def test_addresses_are_left_to_megatron(
    modules: dict[str, types.ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megatron's storage client has no rename."""
    writer = mock.Mock()
    monkeypatch.setattr(megatron_saves, "FileSystemWriter", writer)
    modules[LM].torch.distributed.checkpoint.FileSystemWriter("msc://bucket/iter_0000001")
    writer.assert_called_once_with("msc://bucket/iter_0000001")
