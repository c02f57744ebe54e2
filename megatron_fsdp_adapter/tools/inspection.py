"""Contents of a checkpoint, and differences of two, without loading them.

No code that a checkpoint names is executed (`unpickling.py`): it may not be trusted yet.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from megatron_fsdp_adapter.checkpoint.convert.common_state import OBJECT, has_common, load_common
from megatron_fsdp_adapter.checkpoint.convert.conversion import state_of
from megatron_fsdp_adapter.checkpoint.convert.dcp_files import BLOCK_BYTES, COMMON, DcpFolder
from megatron_fsdp_adapter.checkpoint.convert.lazy import LazyTensor, blocks
from megatron_fsdp_adapter.checkpoint.convert.run_config import with_arguments
from megatron_fsdp_adapter.checkpoint.convert.training_state import argument_of
from megatron_fsdp_adapter.checkpoint.digests import Progress, silent
from megatron_fsdp_adapter.checkpoint.record import TOPOLOGY_OPTIONS, read_record
from megatron_fsdp_adapter.state.names import FP8_SCALING

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


Values = dict[str, Any]


def describe(path: Path, iteration: int | None = None) -> Values:
    """The contents of the checkpoint at `path`: format, folder, iteration, and

    saved_by: recorded training arguments of the run, and the number of processes that wrote files;
    model: recorded arguments for the model's sizes; entries: a dict for each key, in stored order;
    totals: keys, elements of tensors and bytes of each part.

    Raises FileNotFoundError or ValueError as the converters do.
    """
    folder = DcpFolder.open(path, iteration, trusted=False)
    rest = _arguments(folder)
    writers = {m[1] for p in folder.folder.iterdir() if (m := _WRITER.fullmatch(p.name))}
    saved_by = {"processes that wrote files": len(writers), **_known(rest, TOPOLOGY)}
    entries = [_entry(folder, key) for key in folder.metadata.state_dict_metadata]
    if (folder.folder / COMMON).is_file():
        size = (folder.folder / COMMON).stat().st_size
        entries.append(_described(COMMON, OTHER, size))
    totals: dict[str, dict[str, int]] = {}
    for entry in entries:
        row = totals.setdefault(entry["part"], {"keys": 0, "elements": 0, "bytes": 0})
        row["keys"] += 1
        row["bytes"] += entry["nbytes"]
        row["elements"] += 0 if entry["shape"] is None else math.prod(entry["shape"])
    return {
        "format": folder.format,
        "folder": str(folder.folder),
        "iteration": folder.iteration,
        "saved_by": saved_by | _record(folder.folder),
        "model": _known(rest, MODEL),
        "entries": entries,
        "totals": totals,
    }


def diff(
    a: Path,
    b: Path,
    *,
    iterations: tuple[int | None, int | None] = (None, None),
    weights_only: bool = False,
    values: bool = True,
    progress: Progress = silent,
) -> dict[str, list[Any]]:
    """The differences of the checkpoints at `a` and `b`, compared bit by bit, a block at a time.

    only_a, only_b, objects (that are no tensors): keys; shapes, dtypes: "KEY: in A, in B"; values:
    key, number of elements, of those that differ, and their largest difference (NaN if an element
    is NaN).

    Checkpoints of one format are compared by key, those of two formats by parameter name in the
    whole model (weights, including their dtypes, and optimizer state). values: False compares keys,
    shapes and dtypes only. Raises FileNotFoundError or ValueError as the converters do.
    """
    one, other = (
        DcpFolder.open(path, n, trusted=False) for path, n in zip((a, b), iterations, strict=True)
    )
    read = _by_key if one.format == other.format else _by_name
    (left, objects_a), (right, objects_b) = read(one, weights_only), read(other, weights_only)
    common = [key for key in left if key in right]
    shapes = [key for key in common if left[key].shape != right[key].shape]
    dtypes = [key for key in common if left[key].dtype != right[key].dtype]
    comparable = [key for key in common if key not in {*shapes, *dtypes}] if values else []
    total = sum(left[key].nbytes for key in comparable)
    compared = (
        _compare(key, left[key], right[key], lambda nbytes: progress(nbytes, total))
        for key in comparable
    )
    keys_a, keys_b = {**left, **objects_a}, {**right, **objects_b}
    return {
        "only_a": [key for key in keys_a if key not in keys_b],
        "only_b": [key for key in keys_b if key not in keys_a],
        "shapes": [f"{key}: {left[key].shape}, {right[key].shape}" for key in shapes],
        "dtypes": [f"{k}: {_short(left[k].dtype)}, {_short(right[k].dtype)}" for k in dtypes],
        "values": [found for found in compared if found is not None],
        "objects": [
            key for key, read in objects_a.items()
            if values and key in objects_b and not same(read(), objects_b[key]())
        ],
    }


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
    values = read_record(folder) or {}
    plain = {name: value for name, value in values.items() if not isinstance(value, Mapping)}
    return {**plain, **values.get("topology", {}), **values.get("versions", {})}


def _known(rest: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    found = {name: argument_of(rest, name) for name in names}
    return {name: value for name, value in found.items() if value is not None}


def _entry(folder: DcpFolder, key: str) -> Values:
    first = key.split(".")[0]
    part = {"model": WEIGHTS, "optimizer": OPTIMIZER}.get(first, OTHER)
    if not folder.is_tensor(key):
        return _described(key, part, folder.stored_bytes(key))
    tensor = folder.tensor(key)
    if part == OTHER and tensor.dtype.is_floating_point:
        part = WEIGHTS  # torch_dist has no "model." in front
    if key.endswith(FP8_SCALING):
        part = OTHER
    return _described(
        key, part, tensor.nbytes, tensor.shape, _short(tensor.dtype), folder.pieces(key)
    )


def _described(
    key: str, part: str, nbytes: int, shape: tuple[int, ...] | None = None,
    dtype: str | None = None, pieces: int = 1,
) -> Values:
    """A key of a checkpoint. part: weights, optimizer or other; nbytes: size of a tensor's
    elements, or of an object as stored; pieces: number of stored chunks."""
    return {"key": key, "part": part, "shape": shape, "dtype": dtype, "nbytes": nbytes,
            "pieces": pieces}  # fmt: skip


_Contents = tuple[dict[str, LazyTensor], dict[str, Callable[[], Any]]]


def _by_key(folder: DcpFolder, weights_only: bool) -> _Contents:
    def wanted(key: str) -> bool:
        return not weights_only or _entry(folder, key)["part"] == WEIGHTS

    objects: dict[str, Callable[[], Any]] = {
        key: (lambda key=key: folder.object(key))  # type: ignore[misc]
        for key in folder.object_keys
        if not weights_only and key != OBJECT
    }
    if not weights_only and has_common(folder):
        for name, value in load_common(folder).items():
            objects[f"common state: {name}"] = lambda value=value: value  # type: ignore[misc]
    return {key: folder.tensor(key) for key in folder.tensor_keys if wanted(key)}, objects


def _by_name(folder: DcpFolder, weights_only: bool) -> _Contents:
    state = state_of(folder, weights_only)
    tensors = {f"weights.{name}": tensor for name, tensor in state.weights.items()}
    for name, moments in state.moments.items():
        tensors.update({f"{kind}.{name}": moment for kind, moment in moments.items()})
    return tensors, {f"step.{name}": step.item for name, step in state.steps.items()}


def _compare(
    key: str, a: LazyTensor, b: LazyTensor, advance: Callable[[int], object]
) -> Values | None:
    differing, largest = 0, 0.0
    for box in blocks(a.shape, a.dtype.itemsize, BLOCK_BYTES):
        x, y = a.block(box), b.block(box)
        advance(x.nbytes)
        if torch.equal(_bits(x), _bits(y)):
            continue
        differing += int((_bits(x) != _bits(y)).sum())
        gap = (x.double() - y.double()).abs().max().item()
        largest = gap if gap != gap else max(largest, gap)
    found = {"key": key, "elements": a.numel, "differing": differing, "largest": largest}
    return found if differing else None


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(_INTEGERS[tensor.dtype.itemsize])


def same(a: Any, b: Any) -> bool:
    """True if two values are equal; tensors and arrays in them are compared bit by bit."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bits(a), _bits(b))
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
