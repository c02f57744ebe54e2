"""`.metadata` files: what they take where many ranks have a block of each tensor; and those of each
torch are read by each, for torch 2.15 appended to what it pickles of a tensor, and releases before
it stop at that."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from megatron_fsdp_adapter.checkpoint import unpickling
from megatron_fsdp_adapter.checkpoint.convert.dcp_files import Contents, write_folder
from megatron_fsdp_adapter.checkpoint.convert.lazy import LazyTensor
from megatron_fsdp_adapter.checkpoint.storage import SafeWriter
from megatron_fsdp_adapter.checkpoint.tensor_properties import PortableProperties

CHECKS = (
    "checkpoint/tensor_properties.py",
    "checkpoint/convert/dcp_files.py",
    "checkpoint/storage.py",
)

RANKS = 200
KEYS = [f"{kind}.linear_fc2.weight" for kind in ("model", "exp_avg", "exp_avg_sq")]
SIZE = torch.Size([3, 4])
BF16 = {"dtype": torch.bfloat16}


class Later(TensorProperties):
    """Those of a torch to come."""

    def __getstate__(self) -> tuple[Any, ...]:
        return (*super().__getstate__()[:5], (4, 1), "what a torch to come may append")

    def __reduce__(self) -> tuple[Any, ...]:
        return TensorProperties, (), self.__getstate__()


def entry(
    properties: TensorProperties, size: torch.Size = SIZE, ranks: int = 1, made: type = torch.Size
) -> TensorStorageMetadata:
    """A tensor cut into equal blocks of rows; made: the type of what tells of a block."""
    rows = size[0] // ranks
    chunks = []
    for rank in range(ranks):
        chunks.append(ChunkStorageMetadata(made([rows * rank, 0]), made([rows, size[1]])))
    return TensorStorageMetadata(properties, size, chunks)


def one_tensor(properties: TensorProperties, made: type = torch.Size) -> Metadata:
    tensor = entry(properties, made=made)
    index = MetadataIndex("weight", tensor.chunks[0].offsets)
    place = _StorageInfo("__0_0.distcp", 0, 96)
    return Metadata({"weight": tensor}, storage_data={index: place})


def written(folder: Path, metadata: Metadata, results: list[list[WriteResult]]) -> Path:
    writer = SafeWriter(folder)
    writer.set_up_storage_writer(True)
    writer.finish(metadata, results)
    return folder / ".metadata"


def result(index: MetadataIndex, rank: int, offset: int, length: int) -> WriteResult:
    return WriteResult(index, length, (_StorageInfo(f"__{rank}_0.distcp", offset, length), 7))


def results_of(rank: int) -> list[WriteResult]:
    """As DCP gathers them: pickled by each rank."""
    found = []
    for number, key in enumerate(KEYS):
        found.append(
            result(MetadataIndex(key, torch.Size([3 * rank, 0]), rank), rank, 6144 * number, 6144)
        )
    if rank == 0:
        found.append(result(MetadataIndex("step"), 0, 3 * 6144, 9))
    return pickle.loads(pickle.dumps(found))


def test_equal_parts_are_written_once_and_say_what_they_said(tmp_path: Path) -> None:
    def given() -> Metadata:
        size = torch.Size([3 * RANKS, 512])
        large = {key: entry(TensorProperties(), size, RANKS) for key in KEYS}
        return Metadata({"step": BytesStorageMetadata(), **large})

    file = written(tmp_path / "iter_0000001", given(), [results_of(r) for r in range(RANKS)])
    read = pickle.loads(file.read_bytes())
    assert read.state_dict_metadata == given().state_dict_metadata
    places = {one.index: one.storage_data[0] for rank in range(RANKS) for one in results_of(rank)}
    assert read.storage_data == places
    apart = Metadata(given().state_dict_metadata, storage_data=copy.deepcopy(places))
    assert file.stat().st_size < 0.85 * len(pickle.dumps(apart))


def states(file: Path) -> list[tuple[Any, ...]]:
    """What is pickled of each tensor's properties."""
    with mock.patch.object(TensorProperties, "__setstate__") as given:
        pickle.loads(file.read_bytes())
    return [call.args[0] for call in given.call_args_list]


def test_metadata_of_a_torch_to_come_are_read(tmp_path: Path) -> None:
    file = tmp_path / ".metadata"
    file.write_bytes(pickle.dumps(one_tensor(Later(**BF16, requires_grad=True))))
    assert len(states(file)[0]) == 7
    with pytest.raises(ValueError, match="unpack"):
        FileSystemReader(tmp_path).read_metadata()
    read = unpickling.Reader(tmp_path)
    for found in (unpickling.read_metadata(file), read.read_metadata()):
        (stored,) = found.state_dict_metadata.values()
        expected = PortableProperties(**BF16, requires_grad=True)
        assert stored.properties == expected
        assert stored.size == SIZE
    assert found.storage_meta.load_id == read.load_id


def test_blocks_of_the_bundled_engine_are_told_by_tuples(tmp_path: Path) -> None:
    """megatron-core 0.16.1 to 0.19.2: uneven_dtensor.py makes no `torch.Size` of them."""
    file = tmp_path / ".metadata"
    file.write_bytes(pickle.dumps(one_tensor(TensorProperties(**BF16), tuple)))
    (chunk,) = unpickling.read_metadata(file).state_dict_metadata["weight"].chunks  # type: ignore
    assert type(chunk.sizes) is tuple
    assert chunk.sizes == SIZE


@pytest.mark.parametrize("by", ("a save", "a conversion"))
def test_metadata_that_we_write_are_read_by_each_torch(by: str, tmp_path: Path) -> None:
    folder = tmp_path / "iter_0000001"
    if by == "a save":
        written(folder, one_tensor(Later(**BF16)), [[]])
    else:
        folder.mkdir()
        tensor = LazyTensor(tuple(SIZE), torch.bfloat16, lambda offsets, out: out.fill_(1.0))
        write_folder(folder, Contents({("weight",): tensor}, {}), 1 << 20, lambda name, size: None)
    assert [len(state) for state in states(folder / ".metadata")] == [5]
    (stored,) = FileSystemReader(folder).read_metadata().state_dict_metadata.values()
    assert stored.properties == TensorProperties(**BF16)
