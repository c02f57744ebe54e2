"""Folders of torch.distributed.checkpoint (DCP), read and written block by block in one process.

DCP's `load` and `save` need every tensor of the state dict allocated. The reader here finds the
stored chunks that a block needs. The writer is DCP's file writer with a planner that computes each
block just before it is written.

Objects are unpickled unless the folder is opened with trusted=False: convert only checkpoints that
you trust.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch.distributed import checkpoint as torch_dcp
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.utils import _create_file_view

from megatron_fsdp_adapter.checkpoint import atomic, folders
from megatron_fsdp_adapter.checkpoint.convert.lazy import LazyTensor, _slices, blocks
from megatron_fsdp_adapter.checkpoint.digests import Progress
from megatron_fsdp_adapter.checkpoint.tensor_properties import PortableProperties
from megatron_fsdp_adapter.checkpoint.unpickling import load_inert
from megatron_fsdp_adapter.core.dtensor.chunks import tile
from megatron_fsdp_adapter.core.layout.ranges import Box, Shape

KeyPath = tuple[str | int, ...]
FSDP_DTENSOR = "fsdp_dtensor"
TORCH_DIST = "torch_dist"
PLAIN = "dcp"
"""The format of a folder that torch.distributed.checkpoint wrote for a program of the user."""
COMMON = "common.pt"
CONFIG = "metadata.json"
"""Files that only `torch_dist` has: this and `COMMON`."""
BLOCK_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Contents:
    """The contents of a folder to write: tensors and objects by path in the nested state, and other
    files by name, each with the function that writes it."""

    tensors: Mapping[KeyPath, LazyTensor]
    objects: Mapping[KeyPath, Any]
    files: Mapping[str, Callable[[Path], Any]] = field(default_factory=dict)


def detect_format(path: Path, iteration: int | None = None) -> str:
    """The format of the checkpoint at `path`. Raises FileNotFoundError if there is nothing,
    ValueError for anything else."""
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist. Check the path")
    if path.is_file():
        raise ValueError(f"{path} is a file. Name the folder of a checkpoint")
    folders.require_ours(path.parent, path, also=CONFIG)
    root, number = folders.locate(path, iteration)
    folder = folders.final_folder(root, number)
    if (folder / CONFIG).is_file() or (folder / COMMON).is_file():
        return TORCH_DIST
    return FSDP_DTENSOR


def _check_version(folder: Path, metadata: Metadata) -> None:
    """Raises ValueError for a newer format of torch.distributed.checkpoint."""
    version = str(getattr(metadata, "version", None) or "1")
    if version.split(".")[0] != "1":
        raise ValueError(
            f"{folder}: version {version} of torch.distributed.checkpoint's format is newer "
            "than this converter supports (1). Update torch and megatron_fsdp_adapter"
        )


@dataclass
class DcpFolder:
    """A complete DCP folder. Tensors are lazy; one stored chunk at a time is kept in memory."""

    folder: Path
    iteration: int
    # `FSDP_DTENSOR`, `TORCH_DIST` or `PLAIN`. A plain folder has no iteration: 0.
    format: str
    metadata: Metadata
    # True: objects are unpickled, which executes code that they name. False: they are read by
    # `unpickling.load_inert`.
    trusted: bool
    # The chunk that was read last.
    _kept: tuple[MetadataIndex, torch.Tensor] | None = field(default=None, repr=False)

    @classmethod
    def open(cls, path: Path, iteration: int | None = None, trusted: bool = True) -> DcpFolder:
        """Opens the folder at `path`. Raises FileNotFoundError if there is none, ValueError if it
        is half-written or not one of DCP's."""
        format_name = detect_format(path, iteration)
        root, number = folders.locate(path, iteration)
        if format_name == TORCH_DIST:
            folder = folders.final_folder(root, number)
            metadata = folders.read_metadata(root, folder)
        else:
            folder, metadata = folders.open_checkpoint(root, number)
        _check_version(folder, metadata)
        return cls(folder, number, format_name, metadata, trusted)

    @classmethod
    def open_to_read(cls, path: Path, iteration: int | None = None) -> DcpFolder:
        """Opens the folder at `path` without running code that it names. It may also be a plain one
        of torch.distributed.checkpoint. Raises as `open`."""
        if not folders.is_plain(path):
            return cls.open(path, iteration, trusted=False)
        if iteration is not None:
            raise ValueError(f"{path} has no iterations. Leave the option out")
        metadata = folders.read_metadata(path.absolute().parent, path)
        _check_version(path, metadata)
        return cls(path, 0, PLAIN, metadata, trusted=False)

    @property
    def tensor_keys(self) -> tuple[str, ...]:
        """Keys of the tensors, in stored order."""
        return tuple(filter(self.is_tensor, self.metadata.state_dict_metadata))

    @property
    def object_keys(self) -> tuple[str, ...]:
        """Keys of everything else, in stored order."""
        stored = self.metadata.state_dict_metadata
        return tuple(key for key in stored if not self.is_tensor(key))

    def is_tensor(self, key: str) -> bool:
        """True if the value of `key` is a tensor."""
        return isinstance(self.metadata.state_dict_metadata[key], TensorStorageMetadata)

    def pieces(self, key: str) -> int:
        """The number of stored chunks of a tensor; 1 for an object."""
        stored = self.metadata.state_dict_metadata[key]
        if isinstance(stored, TensorStorageMetadata):
            return len(stored.chunks)
        return 1

    def stored_bytes(self, key: str) -> int:
        """Size of an object in its file, in bytes."""
        return int(self.metadata.storage_data[MetadataIndex(key)].length)

    def path_of(self, key: str) -> KeyPath:
        """The recorded path of the value in the nested state; (key,) if there is none. Raises
        ValueError if the recorded path is that of another key."""
        path: Any = (key,)
        recorded = self.metadata.planner_data
        if isinstance(recorded, Mapping):
            path = recorded.get(key, path)
        if not isinstance(path, tuple) or dotted(path) != key:
            raise ValueError(
                f"{self.folder}: key {key} is stored under another path, {path}. The "
                "checkpoint is damaged"
            )
        return path

    def tensor(self, key: str) -> LazyTensor:
        """The tensor under `key`. Its `fill` raises ValueError if a chunk cannot be read."""
        stored = self.metadata.state_dict_metadata[key]
        assert isinstance(stored, TensorStorageMetadata)
        chunks = [(tuple(c.offsets), tuple(c.sizes)) for c in stored.chunks]

        def fill(offsets: Shape, out: torch.Tensor) -> None:
            wanted = offsets, tuple(out.shape)
            filled = []
            for chunk in chunks:
                common = _intersect(wanted, chunk)
                if common is None:
                    continue
                filled.append(common)
                start, sizes = common
                source = _slices(_minus(start, chunk[0]), sizes)
                target = _slices(_minus(start, offsets), sizes)
                out[target].copy_(self._chunk(key, chunk)[source])
            if not tile(wanted, filled):
                raise ValueError(
                    f"{self.folder}: the stored blocks of {key} overlap, or leave a gap in the "
                    f"{out.numel()} elements at {offsets}. The checkpoint is damaged"
                )

        return LazyTensor(tuple(stored.size), stored.properties.dtype, fill)

    def object(self, key: str) -> Any:
        """The object under `key`. Raises ValueError if it cannot be read."""
        return self._load(MetadataIndex(key), weights_only=False)

    def _chunk(self, key: str, chunk: Box) -> torch.Tensor:
        # The stored chunk of `key` at the offsets and of the sizes `chunk`.
        index = MetadataIndex(key, torch.Size(chunk[0]))
        if self._kept is None or self._kept[0] != index:
            self._kept = None  # first, so that two are never in memory
            tensor = self._load(index, weights_only=True)
            if tuple(tensor.shape) != chunk[1]:
                raise ValueError(
                    f"{self.folder}: {key} at {chunk[0]} has shape {tuple(tensor.shape)}, but "
                    f".metadata has {chunk[1]}. The checkpoint is damaged"
                )
            self._kept = index, tensor
        return self._kept[1]

    def _load(self, index: MetadataIndex, weights_only: bool) -> Any:
        # The stored value of `index`, unpickled as `trusted` says unless it is `weights_only`.
        info = self.metadata.storage_data[index]
        if getattr(info, "transform_descriptors", None):
            raise ValueError(
                f"{self.folder}: {index.fqn} is stored with the transforms "
                f"{info.transform_descriptors} (compression), which are not supported"
            )
        path = self.folder / info.relative_path
        with damage_of(f"{path}: {index.fqn}"), path.open("rb") as file:
            view = cast(IO[bytes], _create_file_view(file, info.offset, info.length))
            if weights_only or self.trusted:
                return torch.load(view, map_location="cpu", weights_only=weights_only)
            return load_inert(view)


@contextmanager
def damage_of(what: str) -> Iterator[None]:
    """Replaces the errors of reading `what` by a ValueError about its damage. Errors about missing
    memory stay."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{what} holds an object of {error.name}, which is not installed. Put it on PYTHONPATH"
        ) from error
    except Exception as error:  # pickle may raise any error on damaged bytes
        if isinstance(error, MemoryError) or "allocate memory" in str(error):
            raise  # torch has no error class of its own for it
        lines = str(error).splitlines()
        why = f"{type(error).__name__}: {lines[0] if lines else ''}"
        raise ValueError(f"{what} cannot be read ({why}). The file is damaged") from error


def write_folder(folder: Path, contents: Contents, block_bytes: int, progress: Progress) -> None:
    """Writes `contents` into an empty `folder` in DCP's format, and syncs it.

    Keys are the paths joined by dots. Memory holds at most one block of `block_bytes` (or one
    element) beside the chunks that tensors read for it. Each block becomes a stored chunk.
    """
    planner = _StreamingPlanner(contents, block_bytes, progress)
    writer = torch_dcp.FileSystemWriter(folder, sync_files=False)
    torch_dcp.save({}, storage_writer=writer, planner=planner, no_dist=True)
    for name, write in contents.files.items():
        write(folder / name)
    atomic.sync_files(path for path in folder.iterdir() if path.is_file())


def dotted(path: KeyPath) -> str:
    """The key of a path, as DCP joins it."""
    return ".".join(map(str, path))


class _StreamingPlanner(torch_dcp.DefaultSavePlanner):
    """Plans the blocks of lazy tensors. A block is computed when the writer needs it."""

    def __init__(self, contents: Contents, block_bytes: int, progress: Progress) -> None:
        super().__init__()
        tensors = contents.tensors
        objects = contents.objects
        self._paths = {dotted(path): path for path in (*tensors, *objects)}
        self._tensors = {dotted(path): tensor for path, tensor in tensors.items()}
        self._objects = {dotted(path): value for path, value in objects.items()}
        if len(self._paths) != len(tensors) + len(objects):
            raise ValueError("two values have the same dotted key")
        self._block_bytes = block_bytes
        # Of all tensors, which is the total of `progress`.
        self._nbytes = sum(tensor.nbytes for tensor in tensors.values())
        self._progress = progress

    def create_local_plan(self) -> SavePlan:
        items = []
        for key, tensor in self._tensors.items():
            boxes = blocks(tensor.shape, tensor.dtype.itemsize, self._block_bytes)
            items += [self._item(key, tensor, box) for box in boxes]
        items += [WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO) for key in self._objects]
        return SavePlan(items, planner_data=self._paths)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        key = write_item.index.fqn
        if write_item.type == WriteItemType.BYTE_IO:
            stream = io.BytesIO()
            torch.save(self._objects[key], stream)
            return stream
        assert write_item.tensor_data is not None and write_item.tensor_data.chunk is not None
        chunk = write_item.tensor_data.chunk
        block = self._tensors[key].block((tuple(chunk.offsets), tuple(chunk.sizes)))
        self._progress(block.nbytes, self._nbytes)
        return block

    def _item(self, key: str, tensor: LazyTensor, box: Box) -> WriteItem:
        chunk = ChunkStorageMetadata(*map(torch.Size, box))
        data = TensorWriteData(
            chunk=chunk,
            properties=PortableProperties(dtype=tensor.dtype),
            size=torch.Size(tensor.shape),
        )
        index = MetadataIndex(key, chunk.offsets)
        return WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data)


def _minus(a: Sequence[int], b: Sequence[int]) -> Shape:
    # The offsets `a` relative to the offsets `b`.
    return tuple(x - y for x, y in zip(a, b, strict=True))


def _intersect(a: Box, b: Box) -> Box | None:
    # The block that two blocks of a tensor share; None if they share no element.
    starts = []
    sizes = []
    for start_a, size_a, start_b, size_b in zip(*a, *b, strict=True):
        start = max(start_a, start_b)
        size = min(start_a + size_a, start_b + size_b) - start
        if size <= 0:
            return None
        starts.append(start)
        sizes.append(size)
    return tuple(starts), tuple(sizes)
