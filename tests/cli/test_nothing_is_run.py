"""inspect, diff, verify and a conversion to safetensors run nothing of a checkpoint, whichever of
its files names what."""

from __future__ import annotations

import builtins
import io
import json
import os
import pickle
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
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

sys.path.insert(0, str(Path(__file__).parents[1] / "checkpoint"))

from convert_cases import Model, fsdp_state, save_fsdp

Captured = pytest.CaptureFixture[str]
Payload = tuple[Callable[..., Any], tuple[Any, ...]]
FOLDER, DATA = "iter_0000003", "__0_0.distcp"

PAYLOADS: dict[str, Callable[[str], Payload]] = {
    "a shell": lambda path: (os.system, (f"touch {path}",)),
    "exec": lambda path: (builtins.exec, (f"open({path!r}, 'w')",)),
    "open": lambda path: (io.open, (path, "w")),
}


class Evil:
    """Makes a file when it is unpickled."""

    def __init__(self, payload: Payload) -> None:
        self._payload = payload

    def __reduce__(self) -> Payload:
        return self._payload


def _metadata_itself(root: Path, evil: Evil) -> None:
    (root / FOLDER / ".metadata").write_bytes(pickle.dumps(evil))


def _inside_of_metadata(root: Path, evil: Evil) -> None:
    metadata = FileSystemReader(root / FOLDER).read_metadata()
    metadata.planner_data = {"x": evil}
    (root / FOLDER / ".metadata").write_bytes(pickle.dumps(metadata))


def _with_item(root: Path, index: MetadataIndex, value: Any) -> None:
    """Another file has the item."""
    folder = root / FOLDER
    torch.save(value, folder / "__9_0.distcp")
    metadata = FileSystemReader(folder).read_metadata()
    length = (folder / "__9_0.distcp").stat().st_size
    metadata.storage_data[index] = _StorageInfo("__9_0.distcp", 0, length)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def _arguments(root: Path, evil: Evil) -> None:
    _with_item(root, MetadataIndex("args"), evil)


def _inside_of_arguments(root: Path, evil: Evil) -> None:
    _with_item(root, MetadataIndex("args"), Namespace(num_layers=2, bf16=True, x=[evil]))


def _tensor(root: Path, evil: Evil) -> None:
    stored = FileSystemReader(root / FOLDER).read_metadata().storage_data
    index = next(i for i in stored if i.fqn == "model.module.decoder.final_layernorm.weight")
    _with_item(root, index, evil)


def _common(root: Path, evil: Evil) -> None:
    path = root / FOLDER / "common.pt"
    torch.save({**torch.load(path, weights_only=False), "x": evil}, path)


def _common_itself(root: Path, evil: Evil) -> None:
    (root / FOLDER / "common.pt").write_bytes(pickle.dumps(evil))


def _read_metadata(folder: Path) -> None:
    FileSystemReader(folder).read_metadata()


def _load_item(folder: Path) -> None:
    torch.load(folder / "__9_0.distcp", weights_only=False)


def _load_common(folder: Path) -> None:
    torch.load(folder / "common.pt", weights_only=False)


PLACES: dict[str, tuple[Callable[[Path, Evil], None], Callable[[Path], None], bool]] = {
    ".metadata": (_metadata_itself, _read_metadata, False),
    "in .metadata": (_inside_of_metadata, _read_metadata, False),
    "args": (_arguments, _load_item, False),
    "in args": (_inside_of_arguments, _load_item, False),
    "tensor": (_tensor, _load_item, False),
    "in common.pt": (_common, _load_common, True),
    "common.pt": (_common_itself, _load_common, True),
}
"""Where something evil is put, the reader that runs it, and whether the folder is torch_dist."""


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    root = save_fsdp(tmp_path_factory.mktemp("clean") / "fsdp", fsdp_state(Model()))
    other = root.with_name("torch_dist")
    convert(root, other, "torch_dist")
    return {False: root, True: other}


def _copied(root: Path, target: Path) -> Path:
    (target / FOLDER).mkdir(parents=True)
    for path in (*root.glob("*.txt"), *(root / FOLDER).iterdir()):
        (target / path.relative_to(root)).write_bytes(path.read_bytes())
    return target


def _with_digests(folder: Path) -> None:
    files = {path.name: digests.digest_of(path) for path in folder.iterdir()}
    digests.write_digests(folder, files)


def _run_all(root: Path, clean: dict[bool, Path]) -> list[int]:
    """Every tool on it, also beside one of each format."""
    found = [
        main(["inspect", str(root), "--keys"]),
        main(["inspect", str(root), "--json"]),
        main(["diff", str(root), str(root), "--quiet"]),
        *(main(["diff", str(other), str(root), "--quiet"]) for other in clean.values()),
        main(["diff", str(root), str(clean[False]), "--quiet", "--weights-only"]),
        main(["convert", str(root), str(root / "hf"), "--to", "huggingface", "--quiet"]),
    ]
    _with_digests(root / FOLDER)
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
        root = _copied(clean[is_torch_dist], tmp_path / name.replace(" ", "_"))
        put(root, Evil(payload(str(made))))
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
    root = _copied(clean[False], tmp_path / "root")
    _metadata_itself(root, Evil((os.system, ("true",))))
    for command in (["inspect", str(root)], ["diff", str(root), str(clean[False])]):
        assert main(command) == 2
        told = capsys.readouterr().err
        assert "not to be trusted" in told and "posix.system" in told and "half" not in told


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


@pytest.fixture
def safe_globals() -> Iterator[None]:
    before = torch.serialization.get_safe_globals()
    yield
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals(before)


def test_objects_of_unknown_classes_are_shown_and_compared(
    safe_globals: None, tmp_path: Path, capsys: Captured
) -> None:
    # Whatever the process takes for safe: importing Megatron adds to it.
    torch.serialization.add_safe_globals([Path, Namespace, Backend])
    a, same, b = (
        save_fsdp(tmp_path / name, _objects(backend, seed))
        for name, backend, seed in (
            ("a", Backend.auto, 1), ("same", Backend.auto, 1), ("b", Backend.other, 2)
        )
    )  # fmt: skip
    assert main(["diff", str(a), str(same), "--quiet"]) == 0
    capsys.readouterr()
    assert main(["diff", str(a), str(b), "--quiet", "--json"]) == 1
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

    blocked = [saved(Evil((os.system, (f"echo {i}",)))) for i in (1, 1, 2)]
    assert all(isinstance(value, bytes) for value in blocked)
    assert blocked[0] == blocked[1] != blocked[2]
    assert repr(saved(Backend.auto)) == f"{Backend.__module__}.Backend(1)"
    assert saved({"a": torch.ones(2), "b": [1, None, "x"]})["b"] == [1, None, "x"]
