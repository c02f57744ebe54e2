"""A torch DCP storage writer that never damages an existing checkpoint.

The writer uses only the four calls of DCP's protocol. The coordinator prepares the temporary folder
before the plans are exchanged. Each rank writes its file and forces it to disk. `finish`, which
runs on the coordinator after all ranks have reported, renames the folder. So our saves, background
saves and Megatron's saves, which only let us choose the writer, are safe in the same way without
extra exchanges. The unique name of the temporary folder travels with the plan that DCP sends to
each rank.

The files are those of torch's writer, for torch's reader, except:

- Tensors are written one at a time. torch's writer keeps a copy of every tensor that is a view (all
  of ours are) until the file is closed.
- There are no checksums inside torch.save's archives, which torch.load does not check. Instead each
  file has a digest, computed while it is written (`digests.py`).
- Metadata has only the values that each release of torch reads (`tensor_properties.py`).
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from megatron_fsdp_adapter.checkpoint import atomic, digests, folders, publishing, record
from megatron_fsdp_adapter.checkpoint.tensor_properties import PortableProperties, portable


class SafeWriter(FileSystemWriter):
    """Writes a checkpoint into a temporary folder and renames it once all of it is on disk.

    folder: its final name; topology: values for the record (`record.topology_of`); publish: called
    on the coordinator with the complete temporary folder and the final name; by default for saves
    of Megatron's, which write the tracker themselves. `discard` deletes the files of a failed save.
    """

    def __init__(
        self,
        folder: Path,
        topology: dict[str, Any] | None = None,
        publish: Callable[[Path, Path], None] = publishing.publish_without_tracker,
    ) -> None:
        # `complete_folder` syncs the files after they are flushed; torch syncs before.
        super().__init__(folder, sync_files=False)
        self._folder = folder
        self._publish = publish
        self._topology = topology or {}
        # On the coordinator, while there is an unpublished folder.
        self._temporary: Path | None = None

    @property
    def checkpoint_id(self) -> str:
        """The final folder, for DCP's metadata."""
        return str(self._folder)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Makes the temporary folder, before ranks receive their plans."""
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        if is_coordinator:
            self._temporary = publishing.prepare_folder(self._folder)
            self.path = self._temporary

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """No-op: the coordinator makes the folder, and other ranks would race with it."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Adds to each rank's plan the file to write. Runs on the coordinator."""
        completed = []
        for rank, plan in enumerate(plans):
            file = f"{self._temporary}/__{rank}_0{DEFAULT_SUFFIX}"
            completed.append(dataclasses.replace(plan, storage_data=file))
        return completed

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's items into one file, and forces it to disk."""
        path = Path(plan.storage_data)
        done: Future[list[WriteResult]] = Future()
        with unless_taken(path.parent, self._folder):
            done.set_result(_write_file(path, plan.items, planner))
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Writes metadata, record and digests, forces them to disk, and publishes."""
        temporary = Path(self.path)
        with unless_taken(temporary, self._folder):
            super().finish(metadata, with_shared_parts(metadata, results))
            number = folders.iteration_of(self._folder)
            record.write_record(temporary, len(results), number, self._topology)
            complete_folder(temporary, _file_digests(results))
        self._publish(temporary, self._folder)
        self._temporary = None

    def discard(self) -> None:
        """Deletes the unpublished files of a failed save.

        Acts on the coordinator only, and only once. A folder that cannot be deleted is a warning,
        because the caller raises the save's error."""
        temporary, self._temporary = self._temporary, None
        if temporary is not None:
            publishing.discard(temporary)


@contextmanager
def unless_taken(temporary: Path, folder: Path) -> Iterator[None]:
    """Replaces an OSError by `taken_away` if the temporary folder is gone."""
    try:
        yield
    except OSError as error:
        if temporary.is_dir():
            raise
        raise publishing.taken_away(temporary, folder) from error


def complete_folder(folder: Path, files: dict[str, digests.FileDigest]) -> None:
    """Writes the digests of a folder and forces all but the data files to disk.

    files: digests of the data files. Digests of all other files are computed.
    """
    others = [path for path in folder.iterdir() if path.name not in files]
    found = {path.name: digests.digest_of(path) for path in others}
    digests.write_digests(folder, {**files, **found})
    atomic.sync_files([*others, folder / digests.DIGESTS])
    atomic.sync_folder(folder)


def exact_storage(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` on the CPU, over a storage that contains only its elements.

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
    """Writes the items into a file. The `storage_data` of a result is a pair: the item's place in
    the file, as in torch, and the CRC of the file up to the item's end. The coordinator removes
    the CRC (`with_shared_parts`)."""
    if not items:
        return []
    results = []
    with digests.DigestingFile(path) as file, _no_checksums():
        for item in items:
            start = file.tell()
            data = planner.resolve_data(item)
            if isinstance(data, io.BytesIO):
                file.write(data.getbuffer())
            else:
                _save_tensor(data, file)
            length = file.tell() - start
            place = _StorageInfo(path.name, start, length)
            results.append(WriteResult(item.index, length, (place, file.crc)))
    return results


def _save_tensor(tensor: torch.Tensor, file: digests.DigestingFile) -> None:
    """torch.save of a tensor. An interruption (SystemExit, KeyboardInterrupt), which a signal
    handler may raise, is raised as such: torch.save closes its archive and raises another error."""
    try:
        torch.save(exact_storage(tensor), cast(Any, file))
    except Exception as error:
        if isinstance(error.__context__, (SystemExit, KeyboardInterrupt)):
            raise error.__context__ from None
        raise


@contextmanager
def _no_checksums() -> Iterator[None]:
    """Disables torch.save's checksums. The setting is per thread in torch 2.13. In releases where
    it is per process, concurrent torch.save calls lack checksums too."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def with_shared_parts(
    metadata: Metadata, results: list[list[WriteResult]]
) -> list[list[WriteResult]]:
    """The results without digests. Equal parts of them and of `metadata` become one object;
    `metadata` is changed in place.

    Pickle writes an object once but equal objects each time, so this makes the metadata of many
    ranks smaller and faster to write. Properties that only newer torch reads are dropped."""
    sizes: dict[torch.Size, torch.Size] = {}
    cuts: dict[tuple[tuple[torch.Size, torch.Size], ...], list[ChunkStorageMetadata]] = {}
    kinds: dict[tuple[Any, ...], PortableProperties] = {}

    def once(size: torch.Size) -> torch.Size:
        return sizes.setdefault(size, size)

    for key, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            cut = tuple((chunk.offsets, chunk.sizes) for chunk in entry.chunks)
            if cut not in cuts:
                cuts[cut] = [ChunkStorageMetadata(once(start), once(size)) for start, size in cut]
            own = portable(entry.properties)
            properties = kinds.setdefault(own.state(), own)
            shared = TensorStorageMetadata(properties, entry.size, cuts[cut])
            metadata.state_dict_metadata[key] = shared

    def without_digest(result: WriteResult) -> WriteResult:
        index = result.index
        if index.offset is not None:
            index = dataclasses.replace(index, offset=once(index.offset))
        place, _ = result.storage_data
        return dataclasses.replace(result, index=index, storage_data=place)

    return [[without_digest(result) for result in part] for part in results]


def _file_digests(results: list[list[WriteResult]]) -> dict[str, digests.FileDigest]:
    """Digests of the data files. The result of a file's last item has the digest of the file."""
    found = {}
    for part in results:
        for result in part:
            info, crc = result.storage_data
            # A file's results are in written order, so the last item replaces the others.
            found[info.relative_path] = info.offset + info.length, crc
    return found
