"""inspect, diff and verify run nothing of a checkpoint, whichever of its files names what."""

from __future__ import annotations

import builtins
import io
import json
import os
import pickle
import shutil
import sys
from argparse import Namespace
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex

from megatron_fsdp_adapter.__main__ import main
from megatron_fsdp_adapter.checkpoint import digests, unpickling
from megatron_fsdp_adapter.checkpoint.convert import convert
from tests.lib.checkpoint.convert_cases import Evil, Model, fsdp_state, save_fsdp

CHECKS = (
    "checkpoint/unpickling.py",
    "tools/inspection.py",
    "tools/cli/inspect.py",
    "tools/cli/diff.py",
    "tools/cli/verify.py",
)

Captured = pytest.CaptureFixture[str]
FOLDER = "iter_0000003"
DATA = "__0_0.distcp"
OTHER_DATA = "__9_0.distcp"


def _payloads(path: str) -> dict[str, Evil]:
    """Each makes the file."""
    return {
        "a shell": Evil(os.system, f"touch {path}"),
        "exec": Evil(builtins.exec, f"open({path!r}, 'w')"),
        "open": Evil(io.open, path, "w"),
    }


Put = Callable[[Path, Evil], Any]
"""Puts what is evil into a folder of a checkpoint."""


def _file(name: str) -> Put:
    def put(folder: Path, evil: Evil) -> None:
        (folder / name).write_bytes(pickle.dumps(evil))

    return put


def _in_metadata(folder: Path, evil: Evil) -> None:
    metadata = FileSystemReader(folder).read_metadata()
    metadata.planner_data = {"x": evil}
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def _put_item(folder: Path, key: str, value: Any) -> None:
    """Into another file."""
    path = folder / OTHER_DATA
    torch.save(value, path)
    metadata = FileSystemReader(folder).read_metadata()
    index = MetadataIndex(key)
    for one in metadata.storage_data:
        if one.fqn == key:
            index = one
            break
    metadata.storage_data[index] = _StorageInfo(OTHER_DATA, 0, path.stat().st_size)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def _as_arguments(folder: Path, evil: Evil) -> None:
    _put_item(folder, "args", evil)


def _in_arguments(folder: Path, evil: Evil) -> None:
    _put_item(folder, "args", Namespace(num_layers=2, bf16=True, x=[evil]))


def _as_tensor(folder: Path, evil: Evil) -> None:
    _put_item(folder, "model.module.decoder.final_layernorm.weight", evil)


def _in_common(folder: Path, evil: Evil) -> None:
    path = folder / "common.pt"
    held = torch.load(path, weights_only=False)
    held["x"] = evil
    torch.save(held, path)


def _read_metadata(folder: Path) -> Any:
    return FileSystemReader(folder).read_metadata()


def _read_item(folder: Path) -> Any:
    return torch.load(folder / OTHER_DATA, weights_only=False)


def _read_common(folder: Path) -> Any:
    return torch.load(folder / "common.pt", weights_only=False)


PLACES: dict[str, tuple[Put, Callable[[Path], Any], bool]] = {
    ".metadata": (_file(".metadata"), _read_metadata, False),
    "in .metadata": (_in_metadata, _read_metadata, False),
    "args": (_as_arguments, _read_item, False),
    "in args": (_in_arguments, _read_item, False),
    "tensor": (_as_tensor, _read_item, False),
    "in common.pt": (_in_common, _read_common, True),
    "common.pt": (_file("common.pt"), _read_common, True),
}
"""Where something evil is put, the reader that runs it, and whether the folder is torch_dist."""


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    root = save_fsdp(tmp_path_factory.mktemp("clean") / "fsdp", fsdp_state(Model()))
    other = root.with_name("torch_dist")
    convert(root, other, "torch_dist")
    return {False: root, True: other}


def _run_all(root: Path, clean: dict[bool, Path]) -> list[int]:
    """Every tool on it, also beside one of each format."""
    name = str(root)
    found = []
    found.append(main(["inspect", name, "--keys"]))
    found.append(main(["inspect", name, "--json"]))
    found.append(main(["diff", name, name]))
    for other in clean.values():
        found.append(main(["diff", str(other), name]))
    found.append(main(["diff", name, str(clean[False]), "--weights-only"]))

    folder = root / FOLDER
    files = {path.name: digests.digest_of(path) for path in folder.iterdir()}
    digests.write_digests(folder, files)
    for damaged in (DATA, ".metadata"):
        path = folder / damaged
        main(["verify", name])
        path.write_bytes(path.read_bytes() + b"\0")
        main(["verify", name])
    return found


@pytest.mark.parametrize("place", PLACES)
def test_nothing_is_run(
    place: str, clean: dict[bool, Path], tmp_path: Path, capsys: Captured
) -> None:
    put, read, is_torch_dist = PLACES[place]
    made = tmp_path / "made"
    for name, evil in _payloads(str(made)).items():
        root = shutil.copytree(clean[is_torch_dist], tmp_path / name.replace(" ", "_"))
        put(root / FOLDER, evil)
        statuses = _run_all(root, clean)
        assert set(statuses) <= {0, 1, 2}
        assert not made.exists(), f"{name} in {place} was run"
        # And it would have been.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "stderr", io.StringIO())
            try:
                read(root / FOLDER)
            except Exception as error:
                assert made.exists(), error
        assert made.exists()
        made.unlink()
        capsys.readouterr()


def test_what_metadata_names_and_may_not_is_told(
    clean: dict[bool, Path], tmp_path: Path, capsys: Captured
) -> None:
    root = shutil.copytree(clean[False], tmp_path / "root")
    PLACES[".metadata"][0](root / FOLDER, Evil(os.system, "true"))
    for command in (["inspect", str(root)], ["diff", str(root), str(clean[False])]):
        assert main(command) == 2
        told = capsys.readouterr().err
        assert "is not trusted" in told
        assert "posix.system" in told
        assert "half" not in told


class Backend(Enum):
    """As Megatron has several among its arguments."""

    auto = 1
    other = 2


def _objects(backend: Backend, seed: int) -> dict[str, Any]:
    state = fsdp_state(Model())
    state["args"] = Namespace(num_layers=2, attention_backend=backend, path=Path("/a"))
    state["numpy"] = np.random.RandomState(seed).get_state()
    state["kind"] = Backend
    return state


def test_objects_of_unknown_classes_are_shown_and_compared(
    tmp_path: Path, capsys: Captured
) -> None:
    """Whatever the process takes for safe: importing Megatron adds to it."""
    with torch.serialization.safe_globals([Path, Namespace, Backend]):
        a = save_fsdp(tmp_path / "a", _objects(Backend.auto, 1))
        same = save_fsdp(tmp_path / "same", _objects(Backend.auto, 1))
        b = save_fsdp(tmp_path / "b", _objects(Backend.other, 2))
        assert main(["diff", str(a), str(same)]) == 0
        capsys.readouterr()
        assert main(["diff", str(a), str(b), "--json"]) == 1
        found = json.loads(capsys.readouterr().out)
        assert sorted(key.split(".")[0] for key in found["objects"]) == ["args", "numpy"]
        assert main(["inspect", str(a), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["model"]["num_layers"] == 2
        assert Backend in torch.serialization.get_safe_globals()


def test_what_cannot_be_read_without_running_it_is_compared_by_its_bytes(tmp_path: Path) -> None:
    def saved(value: Any) -> Any:
        stream = io.BytesIO()
        torch.save(value, stream)
        stream.seek(0)
        return unpickling.load_inert(stream)

    one, same, other = (saved(Evil(os.system, f"echo {i}")) for i in (1, 1, 2))
    for blocked in (one, same, other):
        assert isinstance(blocked, bytes)
    assert one == same
    assert one != other
    assert repr(saved(Backend.auto)) == f"{Backend.__module__}.Backend(1)"
    plain = saved({"a": torch.ones(2), "b": [1, None, "x"]})
    assert plain["b"] == [1, None, "x"]
