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

PAYLOADS: dict[str, Callable[[str], tuple[Any, ...]]] = {
    "a shell": lambda path: (os.system, f"touch {path}"),
    "exec": lambda path: (builtins.exec, f"open({path!r}, 'w')"),
    "open": lambda path: (io.open, path, "w"),
}


Put = Callable[[Path, Evil], Any]
"""Puts what is evil into a folder of a checkpoint."""


def _file(name: str) -> Put:
    return lambda folder, evil: (folder / name).write_bytes(pickle.dumps(evil))


def _in_metadata(folder: Path, evil: Evil) -> None:
    metadata = FileSystemReader(folder).read_metadata()
    metadata.planner_data = {"x": evil}
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def _item(key: str, value: Callable[[Evil], Any] = lambda evil: evil) -> Put:
    """Another file has the item."""

    def put(folder: Path, evil: Evil) -> None:
        torch.save(value(evil), folder / "__9_0.distcp")
        metadata = FileSystemReader(folder).read_metadata()
        index = next((i for i in metadata.storage_data if i.fqn == key), MetadataIndex(key))
        length = (folder / "__9_0.distcp").stat().st_size
        metadata.storage_data[index] = _StorageInfo("__9_0.distcp", 0, length)
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))

    return put


def _in_common(folder: Path, evil: Evil) -> None:
    path = folder / "common.pt"
    torch.save({**torch.load(path, weights_only=False), "x": evil}, path)


def _load(name: str) -> Callable[[Path], Any]:
    if name == ".metadata":
        return lambda folder: FileSystemReader(folder).read_metadata()
    return lambda folder: torch.load(folder / name, weights_only=False)


METADATA, ITEM, COMMON = map(_load, (".metadata", "__9_0.distcp", "common.pt"))
PLACES: dict[str, tuple[Put, Callable[[Path], Any], bool]] = {
    ".metadata": (_file(".metadata"), METADATA, False),
    "in .metadata": (_in_metadata, METADATA, False),
    "args": (_item("args"), ITEM, False),
    "in args": (
        _item("args", lambda evil: Namespace(num_layers=2, bf16=True, x=[evil])),
        ITEM,
        False,
    ),
    "tensor": (_item("model.module.decoder.final_layernorm.weight"), ITEM, False),
    "in common.pt": (_in_common, COMMON, True),
    "common.pt": (_file("common.pt"), COMMON, True),
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
    found = [
        main(["inspect", str(root), "--keys"]),
        main(["inspect", str(root), "--json"]),
        main(["diff", str(root), str(root)]),
        *(main(["diff", str(other), str(root)]) for other in clean.values()),
        main(["diff", str(root), str(clean[False]), "--weights-only"]),
    ]
    files = {path.name: digests.digest_of(path) for path in (root / FOLDER).iterdir()}
    digests.write_digests(root / FOLDER, files)
    for damaged in (DATA, ".metadata"):
        path = root / FOLDER / damaged
        main(["verify", str(root)])
        path.write_bytes(path.read_bytes() + b"\0")
        main(["verify", str(root)])
    return found


@pytest.mark.parametrize("place", PLACES)
def test_nothing_is_run(
    place: str, clean: dict[bool, Path], tmp_path: Path, capsys: Captured
) -> None:
    put, read, is_torch_dist = PLACES[place]
    for name, payload in PAYLOADS.items():
        made = tmp_path / "made"
        root = shutil.copytree(clean[is_torch_dist], tmp_path / name.replace(" ", "_"))
        put(root / FOLDER, Evil(*payload(str(made))))
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
    return {
        **fsdp_state(Model()),
        "args": Namespace(num_layers=2, attention_backend=backend, path=Path("/a")),
        "numpy": np.random.RandomState(seed).get_state(),
        "kind": Backend,
    }


def test_objects_of_unknown_classes_are_shown_and_compared(
    tmp_path: Path, capsys: Captured
) -> None:
    """Whatever the process takes for safe: importing Megatron adds to it."""
    with torch.serialization.safe_globals([Path, Namespace, Backend]):
        a, same, b = (
            save_fsdp(tmp_path / name, _objects(backend, seed))
            for name, backend, seed in (
                ("a", Backend.auto, 1),
                ("same", Backend.auto, 1),
                ("b", Backend.other, 2),
            )
        )
        assert main(["diff", str(a), str(same)]) == 0
        capsys.readouterr()
        assert main(["diff", str(a), str(b), "--json"]) == 1
        found = json.loads(capsys.readouterr().out)
        assert sorted(key.split(".")[0] for key in found["objects"]) == ["args", "numpy"]
        assert main(["inspect", str(a), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["model"]["num_layers"] == 2
        assert Backend in torch.serialization.get_safe_globals()


def test_what_cannot_be_read_without_running_it_is_compared_by_its_bytes(tmp_path: Path) -> None:
    def saved(value: Any) -> Any:
        stream = io.BytesIO()
        torch.save(value, stream)
        stream.seek(0)
        return unpickling.load_inert(stream)

    blocked = [saved(Evil(os.system, f"echo {i}")) for i in (1, 1, 2)]
    assert all(isinstance(value, bytes) for value in blocked)
    assert blocked[0] == blocked[1] != blocked[2]
    assert repr(saved(Backend.auto)) == f"{Backend.__module__}.Backend(1)"
    assert saved({"a": torch.ones(2), "b": [1, None, "x"]})["b"] == [1, None, "x"]
