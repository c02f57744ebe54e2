"""A torch DCP storage writer that never damages what is there.

All that makes a save safe happens in the four calls that DCP makes anyway: the coordinator
prepares the temporary folder before the plans are exchanged, each rank writes its file and forces
it to disk, and `finish`, which runs on the coordinator after all ranks have reported, gives the
folder its name. So saves of ours, asynchronous ones, and Megatron's own, which only let us choose
the writer, are safe in the same way and exchange nothing of their own. The name of the temporary
folder, which no other job has, travels with the plan that DCP gives each rank.

The files are what torch's writer makes, for torch's reader. What is written otherwise: one tensor
at a time, where torch's writer keeps a copy of every tensor that is a view (ours all are) until the
file is closed; no checksums inside of torch.save's archives, which torch.load does not look at, but
a digest of each item, computed as it is written (`digests.py`); and of metadata, what each release
of torch reads (`tensor_properties.py`).
"""

from __future__ import annotations

import dataclasses
import io
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import (
    DEFAULT_SUFFIX,
    _StorageInfo,
    _StoragePrefix,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from megatron_fsdp_adapter.checkpoint import digests, folders, record
from megatron_fsdp_adapter.checkpoint.tensor_properties import PortableProperties, portable

Publish = Callable[[Path, Path], None]
"""What gives a finished temporary folder, its first argument, its name, the second."""


@dataclass
class _Place(_StoragePrefix):
    """Where a rank writes: what its files' names begin with, and the temporary folder."""

    folder: str = ""


@dataclass
class _DigestedInfo(_StorageInfo):
    """Where an item lies, and the digest of its file up to its end. Travels to the coordinator
    with DCP's own results, and not into the metadata."""

    crc: int = 0


class SafeWriter(FileSystemWriter):
    """Writes a checkpoint beside its folder, and renames it when all of it is on disk.

    folder: its final name; topology: what the record says of it (`record.topology_of`);
    iteration: likewise; publish: called on the coordinator, once the temporary folder is complete;
    by default the rename alone. Of a save that fails, `discard` removes what it wrote.
    """

    def __init__(
        self,
        folder: Path,
        topology: dict[str, Any] | None = None,
        iteration: int | None = None,
        publish: Publish = folders.rename_into_place,
    ) -> None:
        # `complete_folder` syncs what torch would, and does so after it is flushed.
        super().__init__(folder, sync_files=False)
        self._folder, self._publish = folder, publish
        self._topology, self._iteration = topology, iteration
        self._temporary: Path | None = None
        self._discarding = threading.Lock()

    @property
    def checkpoint_id(self) -> str:
        """The final folder, for DCP's metadata."""
        return str(self._folder)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Makes the temporary folder, before any rank is told what to write."""
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        if is_coordinator:
            self._temporary = self.path = folders.prepare_folder(self._folder)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Nothing: the coordinator makes the folder; others would race with it."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Tells each rank where to write. Runs on the coordinator."""
        return [
            dataclasses.replace(plan, storage_data=_Place(f"__{rank}_", str(self._temporary)))
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's items into one file, and forces it to disk."""
        place: _Place = plan.storage_data
        path = Path(place.folder) / f"{place.prefix}0{DEFAULT_SUFFIX}"
        done: Future[list[WriteResult]] = Future()
        with _unless_taken(path.parent, self._folder):
            done.set_result(_write_file(path, plan.items, planner))
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Writes metadata, record and digests, forces them to disk, and publishes."""
        temporary = Path(self.path)
        with _unless_taken(temporary, self._folder):
            once = Once()
            share_equal_parts(metadata, once)
            super().finish(metadata, [_without_digests(part, once) for part in results])
            saved_by = record.make_record(len(results), self._iteration, self._topology)
            record.write_record(temporary, saved_by)
            complete_folder(temporary, _file_digests(item for part in results for item in part))
        self._publish(temporary, self._folder)
        self._temporary = None

    def discard(self) -> None:
        """Removes what this save wrote, if it was not published; for when it has failed. On the
        coordinator alone; does nothing on other ranks, or a second time. What cannot be removed is
        a warning, since there is an error to be raised already."""
        with self._discarding:
            temporary, self._temporary = self._temporary, None
            if temporary is not None:
                folders.remove_or_warn([temporary])


@contextmanager
def _unless_taken(temporary: Path, folder: Path) -> Iterator[None]:
    """An OSError because another job has taken the temporary folder away says so."""
    try:
        yield
    except OSError as error:
        if temporary.is_dir():
            raise
        raise folders.taken_away(temporary, folder) from error


def complete_folder(folder: Path, files: dict[str, digests.FileDigest]) -> None:
    """Writes the digests of a folder and forces all but the data files to disk.

    files: digests of the data files. What else is in the folder is read and added.
    """
    others = [path for path in folder.iterdir() if path.name not in files]
    found = {path.name: digests.digest_of(path) for path in others}
    digests.write_digests(folder, {**files, **found})
    folders.sync_files([*others, folder / digests.DIGESTS])
    folders.sync_folder(folder)


def exact_storage(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` on the CPU, over a storage that has nothing but its elements.

    torch.save writes whole storages. A contiguous view on the CPU is not copied: the result shares
    its memory.
    """
    tensor = tensor.detach().cpu()
    if tensor.untyped_storage().nbytes() == tensor.nbytes:
        return tensor
    if not tensor.is_contiguous() or tensor.numel() == 0:
        return tensor.clone(memory_format=torch.contiguous_format)
    raw = torch.from_numpy(tensor.view(-1).view(torch.uint8).numpy())
    return raw.view(tensor.dtype).view(tensor.shape)


def _write_file(path: Path, items: list[WriteItem], planner: SavePlanner) -> list[WriteResult]:
    if not items:
        return []
    results = []
    with digests.DigestingFile(path) as file, _no_checksums():
        for item in items:
            start, data = file.tell(), planner.resolve_data(item)
            if isinstance(data, io.BytesIO):
                file.write(data.getbuffer())
            else:
                torch.save(exact_storage(data), cast(Any, file))
            length = file.tell() - start
            info = _DigestedInfo(path.name, start, length, crc=file.crc)
            results.append(WriteResult(item.index, length, info))
    return results


@contextmanager
def _no_checksums() -> Iterator[None]:
    """torch.save without checksums of its own. The setting is the thread's in torch 2.13; in
    releases where it is the process's, what is saved beside meanwhile lacks them too."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


class Once:
    """Gives of equal parts one object. Pickle writes an object once, and equal ones each time:
    where many ranks have blocks of many tensors, the metadata is a quarter smaller, and is written
    in half of the time."""

    def __init__(self) -> None:
        self._sizes: dict[torch.Size, torch.Size] = {}
        self._chunks: dict[tuple[tuple[torch.Size, torch.Size], ...], Any] = {}
        self._properties: dict[tuple[Any, ...], PortableProperties] = {}

    def size(self, value: torch.Size) -> torch.Size:
        return self._sizes.setdefault(value, value)

    def chunks(self, given: list[ChunkStorageMetadata]) -> list[ChunkStorageMetadata]:
        """The same list for tensors that are cut alike, as a weight and its moments are."""
        key = tuple((chunk.offsets, chunk.sizes) for chunk in given)
        if key not in self._chunks:
            self._chunks[key] = [
                ChunkStorageMetadata(self.size(offsets), self.size(sizes)) for offsets, sizes in key
            ]
        return self._chunks[key]  # type: ignore[no-any-return]

    def properties(self, given: TensorProperties) -> PortableProperties:
        made = portable(given)
        return self._properties.setdefault(made.state(), made)


def share_equal_parts(metadata: Metadata, once: Once) -> None:
    """Changes no value, and leaves out those that only a newer torch reads."""
    metadata.state_dict_metadata = {
        key: TensorStorageMetadata(
            once.properties(entry.properties), entry.size, once.chunks(entry.chunks)
        ) if isinstance(entry, TensorStorageMetadata) else entry
        for key, entry in metadata.state_dict_metadata.items()
    }  # fmt: skip


def _without_digests(results: list[WriteResult], once: Once) -> list[WriteResult]:
    return [
        dataclasses.replace(
            result,
            index=_with_offset(result.index, once),
            storage_data=_StorageInfo(
                result.storage_data.relative_path,
                result.storage_data.offset,
                result.storage_data.length,
            ),
        )
        for result in results
    ]


def _with_offset(index: MetadataIndex, once: Once) -> MetadataIndex:
    if index.offset is None:
        return index
    return dataclasses.replace(index, offset=once.size(index.offset))


def _file_digests(results: Iterable[WriteResult]) -> dict[str, digests.FileDigest]:
    """Of the data files, from the results of their items, which are in the order of the file."""
    notes: dict[str, list[tuple[int, int]]] = {}
    for result in results:
        info = result.storage_data
        notes.setdefault(info.relative_path, []).append((info.offset + info.length, info.crc))
    return {
        name: digests.FileDigest(*zip(*listed, strict=True)) for name, listed in notes.items()
    }
