"""Contents of a checkpoint, without loading them.

No code that a checkpoint names is executed (`unpickling.py`): it may not be trusted yet.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_fsdp_adapter.checkpoint import folders
from megatron_fsdp_adapter.checkpoint.convert.common_state import (
    COMMON,
    has_common,
    load_common,
)
from megatron_fsdp_adapter.checkpoint.convert.conversion import TORCH_DIST, detect_format
from megatron_fsdp_adapter.checkpoint.convert.dcp_files import DcpFolder
from megatron_fsdp_adapter.checkpoint.convert.run_config import with_arguments
from megatron_fsdp_adapter.checkpoint.convert.training_state import argument_of
from megatron_fsdp_adapter.checkpoint.names import FP8_SCALING
from megatron_fsdp_adapter.checkpoint.record import TOPOLOGY_OPTIONS, read_record

TOPOLOGY = (
    "world_size", "data_parallel_size", "use_megatron_fsdp", "use_distributed_optimizer",
    *TOPOLOGY_OPTIONS,
)  # fmt: skip
MODEL = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups",
    "num_experts", "padded_vocab_size", "transformer_impl", "bf16", "fp16",
)  # fmt: skip
"""Training arguments that are shown if a checkpoint has them."""

WEIGHTS, OPTIMIZER, OTHER = "weights", "optimizer", "other"
_WRITER = re.compile(r"__(\d+)_\d+\.distcp")


@dataclass(frozen=True)
class Entry:
    """One key of a checkpoint.

    shape, dtype: None for an object; part: weights, optimizer or other; nbytes: size of a tensor's
    elements, or of an object as stored; pieces: number of stored chunks."""

    key: str
    part: str
    shape: tuple[int, ...] | None
    dtype: str | None
    nbytes: int
    pieces: int


@dataclass(frozen=True)
class Description:
    """The contents of a checkpoint.

    saved_by: recorded training arguments of the run, and the number of processes that wrote files;
    model: recorded arguments for the model's sizes; entries: in stored order.
    """

    format: str
    folder: str
    iteration: int | None
    saved_by: Mapping[str, Any]
    model: Mapping[str, Any]
    entries: tuple[Entry, ...]

    def totals(self) -> dict[str, dict[str, int]]:
        """Keys, elements of tensors and bytes of each part."""
        found: dict[str, dict[str, int]] = {}
        for entry in self.entries:
            row = found.setdefault(entry.part, {"keys": 0, "elements": 0, "bytes": 0})
            row["keys"] += 1
            row["bytes"] += entry.nbytes
            if entry.shape is not None:
                row["elements"] += torch.Size(entry.shape).numel()
        return found


def describe(path: Path, iteration: int | None = None) -> Description:
    """Reads the structure of the checkpoint at `path`, and its training arguments.

    Raises FileNotFoundError or ValueError as the converters do.
    """
    found = detect_format(path, iteration)
    folder = DcpFolder.open(path, iteration, found == TORCH_DIST, trusted=False)
    rest = _arguments(folder)
    writers = {m[1] for p in folder.folder.iterdir() if (m := _WRITER.fullmatch(p.name))}
    saved_by = {"processes that wrote files": len(writers), **_known(rest, TOPOLOGY)}
    saved_by |= _record(folder.folder)
    entries = [_entry(folder, key) for key in folder.metadata.state_dict_metadata]
    if (folder.folder / COMMON).is_file():
        size = (folder.folder / COMMON).stat().st_size
        entries.append(Entry(COMMON, OTHER, None, None, size, 1))
    _, number = folders.locate(path, iteration)
    return Description(
        found, str(folder.folder), number, saved_by, _known(rest, MODEL), tuple(entries)
    )


def _arguments(folder: DcpFolder) -> dict[str, Any]:
    if "args" in folder.object_keys:
        return {"args": folder.object("args")}
    if has_common(folder):
        return with_arguments(load_common(folder), folder.folder)
    prefix = "args."
    keys = [key for key in folder.object_keys if key.startswith(prefix)]
    found = {key.removeprefix(prefix): folder.object(key) for key in keys}
    return with_arguments({"args": found}, folder.folder)


def _record(folder: Path) -> dict[str, Any]:
    """The values of the save's record, flat; empty without a record."""
    found = read_record(folder)
    values = {} if found is None else vars(found)
    plain = {name: value for name, value in values.items() if not isinstance(value, Mapping)}
    return {**plain, **values.get("topology", {}), **values.get("versions", {})}


def _known(rest: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    found = {name: argument_of(rest, name) for name in names}
    return {name: value for name, value in found.items() if value is not None}


def _entry(folder: DcpFolder, key: str) -> Entry:
    first = key.split(".")[0]
    part = {"model": WEIGHTS, "optimizer": OPTIMIZER}.get(first, OTHER)
    if not folder.is_tensor(key):
        return Entry(key, part, None, None, folder.stored_bytes(key), 1)
    tensor = folder.tensor(key)
    if part == OTHER and tensor.dtype.is_floating_point:
        part = WEIGHTS  # torch_dist has no "model." in front
    if key.endswith(FP8_SCALING):
        part = OTHER
    return Entry(
        key, part, tensor.shape, _short(tensor.dtype), tensor.nbytes, folder.pieces(key)
    )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
