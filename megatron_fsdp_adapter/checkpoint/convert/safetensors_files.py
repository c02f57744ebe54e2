"""Folders of safetensors files, as `transformers` writes them; read and written block by block.

Files are read with the `safetensors` package, which maps them into memory: what has been read is
the system's to keep or drop. It can only write whole files that are in memory, so the writer is
our own: eight bytes of header length, a JSON header, then the tensors' bytes in order.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_fsdp_adapter.checkpoint import folders
from megatron_fsdp_adapter.checkpoint.convert.dcp_files import Progress
from megatron_fsdp_adapter.checkpoint.convert.lazy import LazyTensor, Shape, _slices, blocks

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"

DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def read_tensors(folder: Path) -> dict[str, LazyTensor]:
    """All tensors of a folder, by name.

    Raises FileNotFoundError if it has no safetensors, ValueError if a file is missing, truncated or
    damaged, or a tensor is not where the index says.
    """
    found: dict[str, LazyTensor] = {}
    for path, promised in _files(folder).items():
        tensors = _tensors_of(path)
        absent = sorted(set(promised) - set(tensors))
        if absent:
            raise ValueError(f"{path} lacks {', '.join(absent)}, which {INDEX} promises")
        found.update(tensors)
    return found


def write_tensors(
    folder: Path,
    tensors: Mapping[str, LazyTensor],
    block_bytes: int,
    max_file_bytes: int,
    progress: Progress,
) -> None:
    """Writes the tensors into `folder`, in files of at most `max_file_bytes` (one tensor at
    least), with an index if there are several; syncs them. One block is in memory at a time."""
    parts = _partition(tensors, max_file_bytes)
    weight_map = {}
    for i, names in enumerate(parts):
        several = f"model-{i + 1:05d}-of-{len(parts):05d}.safetensors"
        path = folder / (SINGLE if len(parts) == 1 else several)
        _write_file(path, {name: tensors[name] for name in names}, block_bytes, progress)
        weight_map.update(dict.fromkeys(names, path.name))
    if len(parts) > 1:
        total = sum(tensor.nbytes for tensor in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    folders.sync_files(path for path in folder.iterdir() if path.is_file())


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises FileNotFoundError, or ValueError if the file holds none."""
    try:
        value = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds no JSON object")
    return value


def _files(folder: Path) -> dict[Path, list[str]]:
    """File -> the names that the index puts into it; no names without an index."""
    if not (folder / INDEX).is_file():
        paths = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
        if not paths:
            raise FileNotFoundError(f"{folder} has no *.safetensors files; check the path")
        return {path: [] for path in paths}
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ValueError(f"{folder / INDEX} has no weight_map")
    files: dict[Path, list[str]] = {}
    for name, file in weight_map.items():
        files.setdefault(folder / file, []).append(name)
    missing = sorted(path.name for path in files if not path.is_file())
    if missing:
        raise ValueError(f"{folder} lacks {', '.join(missing)}, which {INDEX} names")
    return files


@dataclass
class _OpenFile:
    """One file at a time is mapped."""

    path: Path | None = None
    handle: Any = None

    def get(self, path: Path) -> Any:
        if self.path != path:
            from safetensors import SafetensorError, safe_open

            self.handle = None
            try:
                self.handle = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{path} is truncated or damaged: {error}") from error
            self.path = path
        return self.handle


def _tensors_of(path: Path) -> dict[str, LazyTensor]:
    opened = _OpenFile()
    handle = opened.get(path)
    return {name: _lazy(opened, path, name, handle.get_slice(name)) for name in handle.keys()}  # noqa: SIM118


def _lazy(opened: _OpenFile, path: Path, name: str, view: Any) -> LazyTensor:
    stored = view.get_dtype()
    if stored not in DTYPES:
        raise ValueError(f"{path}: {name} is stored as {stored}, which cannot be converted")

    def fill(offsets: Shape, out: torch.Tensor) -> None:
        part = opened.get(path).get_slice(name)
        # A 0-D tensor has no slices.
        out.copy_(part[_slices(offsets, tuple(out.shape))] if offsets else part[:])

    return LazyTensor(tuple(view.get_shape()), DTYPES[stored], fill)


def _partition(tensors: Mapping[str, LazyTensor], limit: int) -> list[list[str]]:
    parts: list[list[str]] = [[]]
    size = 0
    for name, tensor in tensors.items():
        if parts[-1] and size + tensor.nbytes > limit:
            parts.append([])
            size = 0
        parts[-1].append(name)
        size += tensor.nbytes
    return parts


def _write_file(
    path: Path, tensors: Mapping[str, LazyTensor], block_bytes: int, progress: Progress
) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the data is aligned
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, tensor in tensors.items():
            for block in _blocks_of(tensor, block_bytes):
                raw: Any = block.reshape(-1).view(torch.uint8).numpy()
                file.write(raw)
                progress(name, block.nbytes)


def _blocks_of(tensor: LazyTensor, block_bytes: int) -> Iterator[torch.Tensor]:
    for box in blocks(tensor.shape, tensor.dtype.itemsize, block_bytes):
        yield tensor.block(box)
