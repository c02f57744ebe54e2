"""Folders of safetensors files, as `transformers` writes them; read and written block by block.

A file is eight bytes of header length, a JSON header, then the tensors' bytes in order. The
`safetensors` package validates files. It reads and writes only whole files (mapped into or held in
memory), so tensor bytes are read and written here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

from megatron_fsdp_adapter.checkpoint import folders
from megatron_fsdp_adapter.checkpoint.convert.dcp_files import Progress
from megatron_fsdp_adapter.checkpoint.convert.lazy import LazyTensor, Shape, blocks

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
    damaged, or if a tensor is not in the file that the index names.
    """
    found: dict[str, LazyTensor] = {}
    for path, promised in _files(folder).items():
        tensors = _tensors_of(path)
        absent = sorted(set(promised) - set(tensors))
        if absent:
            raise ValueError(f"{path} lacks {', '.join(absent)}, which {INDEX} lists")
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
    """File -> tensor names by the index; no names without an index."""
    if not (folder / INDEX).is_file():
        paths = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
        if not paths:
            raise FileNotFoundError(f"{folder} has no *.safetensors files. Check the path")
        return {path: [] for path in paths}
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ValueError(f"{folder / INDEX} has no weight_map")
    files: dict[Path, list[str]] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise ValueError(
                f"{folder / INDEX} maps {name} to {file!r}, which is no file of this folder. "
                "Correct the index"
            )
        files.setdefault(folder / file, []).append(name)
    missing = sorted(path.name for path in files if not path.is_file())
    if missing:
        raise ValueError(f"{folder} lacks {', '.join(missing)}, which {INDEX} names")
    return files


def _tensors_of(path: Path) -> dict[str, LazyTensor]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np"):
            pass
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is truncated or damaged: {error}") from error
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return {name: _lazy(path, 8 + length, name, entry) for name, entry in header.items()}


def _lazy(path: Path, data: int, name: str, entry: Mapping[str, Any]) -> LazyTensor:
    if entry["dtype"] not in DTYPES:
        raise ValueError(f"{path}: {name} is stored as {entry['dtype']}, which cannot be converted")
    shape, dtype = tuple(entry["shape"]), DTYPES[entry["dtype"]]
    start = data + entry["data_offsets"][0]

    def fill(offsets: Shape, out: torch.Tensor) -> None:
        with path.open("rb") as file:
            _read_block(file, start, shape, offsets, out)

    return LazyTensor(shape, dtype, fill)


def _read_block(
    file: BinaryIO, start: int, shape: Shape, offsets: Shape, out: torch.Tensor
) -> None:
    """Reads the block at `offsets` of a tensor of `shape` whose bytes begin at `start`."""
    if tuple(out.shape[1:]) != shape[1:]:
        row = math.prod(shape[1:]) * out.element_size()
        for i, part in enumerate(out.unbind(0)):
            _read_block(file, start + (offsets[0] + i) * row, shape[1:], offsets[1:], part)
        return
    skipped = offsets[0] * math.prod(shape[1:]) if shape else 0
    file.seek(start + skipped * out.element_size())
    buffer = out if out.is_contiguous() else torch.empty_like(out).contiguous()
    raw: Any = buffer.reshape(-1).view(torch.uint8).numpy()
    if file.readinto(raw) != buffer.nbytes:  # type: ignore[attr-defined]
        raise ValueError(f"{file.name} ends in the middle of a tensor")
    if buffer is not out:
        out.copy_(buffer)


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
            for box in blocks(tensor.shape, tensor.dtype.itemsize, block_bytes):
                block = tensor.block(box)
                raw: Any = block.reshape(-1).view(torch.uint8).numpy()
                file.write(raw)
                progress(name, block.nbytes)
