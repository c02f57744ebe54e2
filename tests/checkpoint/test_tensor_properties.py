"""Metadata of each torch are read by each: torch 2.15 appended to what it pickles of a tensor, and
releases before it stop at that."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron_fsdp_adapter.checkpoint import unpickling
from megatron_fsdp_adapter.checkpoint.convert.dcp_files import Contents, write_folder
from megatron_fsdp_adapter.checkpoint.convert.lazy import LazyTensor
from megatron_fsdp_adapter.checkpoint.storage import SafeWriter
from megatron_fsdp_adapter.checkpoint.tensor_properties import PortableProperties

APPENDED = ((4, 1), "what a torch to come may append")
SIZE = torch.Size([3, 4])


class Later(TensorProperties):
    """Those of a torch to come."""

    def __getstate__(self) -> tuple[Any, ...]:
        return (*super().__getstate__()[:5], *APPENDED)

    def __reduce__(self) -> tuple[Any, ...]:
        return TensorProperties, (), self.__getstate__()


def metadata(properties: TensorProperties, size_of: type = torch.Size) -> Metadata:
    chunk = ChunkStorageMetadata(size_of([0, 0]), size_of(SIZE))
    stored = {MetadataIndex("weight", chunk.offsets): _StorageInfo("__0_0.distcp", 0, 96)}
    entry = TensorStorageMetadata(properties, SIZE, [chunk])
    return Metadata({"weight": entry}, storage_data=stored)


def states(file: Path) -> list[tuple[Any, ...]]:
    """What is pickled of each tensor's properties."""
    found: list[tuple[Any, ...]] = []

    class Recorded:
        def __setstate__(self, state: tuple[Any, ...]) -> None:
            found.append(state)

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            return Recorded if name == "TensorProperties" else super().find_class(module, name)

    with file.open("rb") as opened:
        Unpickler(opened).load()
    return found


def test_metadata_of_a_torch_to_come_are_read(tmp_path: Path) -> None:
    file = tmp_path / ".metadata"
    file.write_bytes(pickle.dumps(metadata(Later(dtype=torch.bfloat16, requires_grad=True))))
    assert len(states(file)[0]) == 7
    with pytest.raises(ValueError, match="unpack"):
        FileSystemReader(tmp_path).read_metadata()
    read = unpickling.Reader(tmp_path)
    for found in (unpickling.read_metadata(file), read.read_metadata()):
        (stored,) = found.state_dict_metadata.values()
        expected = PortableProperties(dtype=torch.bfloat16, requires_grad=True)
        assert (stored.properties, stored.size) == (expected, SIZE)
    assert found.storage_meta.load_id == read.load_id


def test_blocks_of_the_bundled_engine_are_told_by_tuples(tmp_path: Path) -> None:
    """megatron-core 0.16.1 to 0.19.2: uneven_dtensor.py makes no `torch.Size` of them."""
    file = tmp_path / ".metadata"
    file.write_bytes(pickle.dumps(metadata(TensorProperties(dtype=torch.bfloat16), tuple)))
    (chunk,) = unpickling.read_metadata(file).state_dict_metadata["weight"].chunks  # type: ignore
    assert type(chunk.sizes) is tuple and chunk.sizes == SIZE


def _saved(folder: Path) -> None:
    writer = SafeWriter(folder)
    writer.set_up_storage_writer(True)
    writer.finish(metadata(Later(dtype=torch.bfloat16)), [[]])


def _ones(offsets: tuple[int, ...], out: torch.Tensor) -> None:
    out.fill_(1.0)


def _converted(folder: Path) -> None:
    tensor = LazyTensor(tuple(SIZE), torch.bfloat16, _ones)
    folder.mkdir()
    write_folder(folder, Contents({("weight",): tensor}, {}), 1 << 20, lambda name, size: None)


@pytest.mark.parametrize("write", (_saved, _converted))
def test_metadata_that_we_write_are_read_by_each_torch(write: Any, tmp_path: Path) -> None:
    folder = tmp_path / "iter_0000001"
    write(folder)
    assert [len(state) for state in states(folder / ".metadata")] == [5]
    (stored,) = FileSystemReader(folder).read_metadata().state_dict_metadata.values()
    assert stored.properties == TensorProperties(dtype=torch.bfloat16)
