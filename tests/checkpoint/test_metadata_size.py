"""What the metadata of a checkpoint takes where many ranks have a block of each tensor."""

from __future__ import annotations

import copy
import pickle

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from megatron_fsdp_adapter.checkpoint.storage import SafeWriter, _DigestedInfo

RANKS, KEYS = 200, [f"{kind}.linear_fc2.weight" for kind in ("model", "exp_avg", "exp_avg_sq")]


def metadata() -> Metadata:
    entries = {"step": BytesStorageMetadata()} | {
        key: TensorStorageMetadata(
            TensorProperties(), torch.Size([3 * RANKS, 512]),
            [ChunkStorageMetadata(torch.Size([3 * rank, 0]), torch.Size([3, 512]))
             for rank in range(RANKS)],
        )
        for key in KEYS
    }  # fmt: skip
    return Metadata(entries)


def results(rank: int) -> list[WriteResult]:
    """As DCP gathers them: pickled by each rank."""
    found = []
    for number, key in enumerate(KEYS):
        index = MetadataIndex(key, torch.Size([3 * rank, 0]), rank)
        info = _DigestedInfo(f"__{rank}_0.distcp", 6144 * number, 6144, crc=7)
        found.append(WriteResult(index, 6144, info))
    if rank == 0:
        info = _DigestedInfo("__0_0.distcp", 3 * 6144, 9, crc=7)
        found.append(WriteResult(MetadataIndex("step"), 9, info))
    return pickle.loads(pickle.dumps(found))


def test_equal_parts_are_written_once_and_say_what_they_said(tmp_path):
    given = metadata()
    writer = SafeWriter(tmp_path / "iter_0000001")
    writer.set_up_storage_writer(True)
    writer.finish(given, [results(rank) for rank in range(RANKS)])
    file = tmp_path / "iter_0000001" / ".metadata"
    read = pickle.loads(file.read_bytes())
    assert read.state_dict_metadata == metadata().state_dict_metadata
    places = {one.index: one.storage_data for rank in range(RANKS) for one in results(rank)}
    assert read.storage_data.keys() == places.keys()
    for index, place in places.items():
        stored = read.storage_data[index]
        assert (stored.relative_path, stored.offset, stored.length) == (
            place.relative_path, place.offset, place.length
        )  # fmt: skip
    apart = Metadata(metadata().state_dict_metadata, storage_data=copy.deepcopy(places))
    assert file.stat().st_size < 0.85 * len(pickle.dumps(apart))
