"""Contents of a checkpoint, and differences of two, without loading them.

No code that a checkpoint names is executed (`unpickling.py`): it may not be trusted yet.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_fsdp_adapter.checkpoint import folders
from megatron_fsdp_adapter.checkpoint.convert.common_state import (
    COMMON,
    OBJECT,
    has_common,
    load_common,
)
from megatron_fsdp_adapter.checkpoint.convert.conversion import (
    MIB,
    TORCH_DIST,
    Options,
    detect_format,
    open_state,
)
from megatron_fsdp_adapter.checkpoint.convert.dcp_files import DcpFolder, Progress
from megatron_fsdp_adapter.checkpoint.convert.lazy import LazyTensor, blocks
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
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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


@dataclass(frozen=True)
class ValueDifference:
    """Two tensors of one shape and dtype that differ in bits. largest: the largest absolute
    difference (NaN if an element is NaN)."""

    key: str
    elements: int
    differing: int
    largest: float


@dataclass(frozen=True)
class Difference:
    """The differences of checkpoint A from checkpoint B; falsy if there are none.

    shapes, dtypes: "KEY: in A, in B"; objects: keys of values that are not tensors.
    """

    only_a: tuple[str, ...] = ()
    only_b: tuple[str, ...] = ()
    shapes: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    values: tuple[ValueDifference, ...] = ()
    objects: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return any(vars(self).values())


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


def diff(
    a: Path,
    b: Path,
    *,
    iterations: tuple[int | None, int | None] = (None, None),
    weights_only: bool = False,
    values: bool = True,
    block_bytes: int = 64 * MIB,
    begin: Callable[[int], Progress] | None = None,
) -> Difference:
    """The differences of the checkpoints at `a` and `b`, compared bit by bit, a block at a time.

    Checkpoints of one format are compared by key, those of two formats by parameter name in the
    whole model (weights, including their dtypes, and optimizer state). values: False compares keys,
    shapes and dtypes only. Raises FileNotFoundError or ValueError as the converters do.
    """
    formats = [detect_format(path, n) for path, n in zip((a, b), iterations, strict=True)]
    read = _by_key if formats[0] == formats[1] else _by_name
    (left, objects_a), (right, objects_b) = (
        read(path, n, found, weights_only)
        for path, n, found in zip((a, b), iterations, formats, strict=True)
    )
    common = [key for key in left if key in right]
    shapes = [key for key in common if left[key].shape != right[key].shape]
    dtypes = [key for key in common if left[key].dtype != right[key].dtype]
    comparable = [key for key in common if key not in {*shapes, *dtypes}] if values else []
    progress = begin(sum(left[key].nbytes for key in comparable)) if begin else None
    compared = (_compare(k, left[k], right[k], block_bytes, progress) for k in comparable)
    keys_a, keys_b = {**left, **objects_a}, {**right, **objects_b}
    return Difference(
        only_a=tuple(key for key in keys_a if key not in keys_b),
        only_b=tuple(key for key in keys_b if key not in keys_a),
        shapes=tuple(f"{key}: {left[key].shape}, {right[key].shape}" for key in shapes),
        dtypes=tuple(f"{k}: {_short(left[k].dtype)}, {_short(right[k].dtype)}" for k in dtypes),
        values=tuple(found for found in compared if found is not None),
        objects=tuple(_different_objects(objects_a, objects_b)) if values else (),
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


_Contents = tuple[dict[str, LazyTensor], dict[str, Callable[[], Any]]]


def _by_key(path: Path, iteration: int | None, found: str, weights_only: bool) -> _Contents:
    folder = DcpFolder.open(path, iteration, found == TORCH_DIST, trusted=False)

    def wanted(key: str) -> bool:
        return not weights_only or _entry(folder, key).part == WEIGHTS

    objects: dict[str, Callable[[], Any]] = {
        key: (lambda key=key: folder.object(key))  # type: ignore[misc]
        for key in folder.object_keys
        if not weights_only and key != OBJECT
    }
    if not weights_only and has_common(folder):
        for name, value in load_common(folder).items():
            objects[f"common state: {name}"] = lambda value=value: value  # type: ignore[misc]
    return {key: folder.tensor(key) for key in folder.tensor_keys if wanted(key)}, objects


def _by_name(path: Path, iteration: int | None, found: str, weights_only: bool) -> _Contents:
    options = Options(weights_only=weights_only)
    state = open_state(path, found, iteration, options, trusted=False).state
    tensors = {f"weights.{name}": tensor for name, tensor in state.weights.items()}
    for name, moments in state.moments.items():
        tensors.update({f"{kind}.{name}": moment for kind, moment in moments.items()})
    return tensors, {f"step.{name}": step.item for name, step in state.steps.items()}


def _compare(
    key: str, a: LazyTensor, b: LazyTensor, block_bytes: int, progress: Progress | None
) -> ValueDifference | None:
    differing, largest = 0, 0.0
    for box in blocks(a.shape, a.dtype.itemsize, block_bytes):
        x, y = a.block(box), b.block(box)
        if progress is not None:
            progress(key, x.nbytes)
        if torch.equal(_bits(x), _bits(y)):
            continue
        differing += int((_bits(x) != _bits(y)).sum())
        gap = (x.double() - y.double()).abs().max().item()
        largest = gap if gap != gap else max(largest, gap)
    return ValueDifference(key, a.numel, differing, largest) if differing else None


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(_INTEGERS[tensor.dtype.itemsize])


def _different_objects(
    a: Mapping[str, Callable[[], Any]], b: Mapping[str, Callable[[], Any]]
) -> Iterator[str]:
    for key in a:
        if key in b and not same(a[key](), b[key]()):
            yield key


def same(a: Any, b: Any) -> bool:
    """True if two values are equal; tensors and arrays in them are compared bit by bit."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        fits = a.dtype == b.dtype and a.shape == b.shape
        return fits and torch.equal(_bits(a), _bits(b))
    if type(a) is not type(b):
        return False
    if isinstance(a, Mapping):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if hasattr(a, "tobytes"):
        return bool(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())
    if hasattr(a, "__dict__") and type(a).__eq__ is object.__eq__:
        return same(vars(a), vars(b))
    return bool(a == b)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
