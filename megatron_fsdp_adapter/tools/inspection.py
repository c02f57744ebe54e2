"""Contents of a checkpoint, and differences of two, without loading them.

No code that a checkpoint names is executed (`unpickling.py`): it may not be trusted yet.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_fsdp_adapter.checkpoint.convert.common_state import OBJECT, has_common, load_common
from megatron_fsdp_adapter.checkpoint.convert.conversion import state_of
from megatron_fsdp_adapter.checkpoint.convert.dcp_files import BLOCK_BYTES, COMMON, PLAIN, DcpFolder
from megatron_fsdp_adapter.checkpoint.convert.lazy import LazyTensor, Tensors, blocks
from megatron_fsdp_adapter.checkpoint.convert.run_config import with_arguments
from megatron_fsdp_adapter.checkpoint.convert.training_state import argument_of
from megatron_fsdp_adapter.checkpoint.digests import Progress, silent
from megatron_fsdp_adapter.checkpoint.record import TOPOLOGY_OPTIONS, read_record
from megatron_fsdp_adapter.core.layout.ranges import Shape
from megatron_fsdp_adapter.state.names import FP8_SCALING

TOPOLOGY = (
    "world_size", "data_parallel_size", "use_megatron_fsdp", "use_distributed_optimizer",
    *TOPOLOGY_OPTIONS,
)  # fmt: skip
MODEL = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups",
    "num_experts", "padded_vocab_size", "transformer_impl", "bf16", "fp16",
)  # fmt: skip
"""Training arguments that are shown, under `saved_by` and `model`, if a checkpoint has them."""

WEIGHTS = "weights"
OPTIMIZER = "optimizer"
OTHER = "other"
_PARTS = {"model": WEIGHTS, "optimizer": OPTIMIZER}
_OPTIMIZER_NAME = re.compile(r"(?:^|\.)optim(?:s|izers?)?\.")
"""A part of a key under which programs store the state of an optimizer."""
_WRITER = re.compile(r"__(\d+)_\d+\.distcp")
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


Values = dict[str, Any]


def describe(path: Path, iteration: int | None = None) -> Values:
    """Returns the contents of a checkpoint, without its data. The command `inspect` prints them.

    Examples:
        >>> _ = save_checkpoint(folder, 10, {"model": {"scale": torch.ones(3)}})
        >>> found = describe(folder)
        >>> found["iteration"], [entry["key"] for entry in found["entries"]]
        (10, ['model.scale'])

    Args:
        path: a folder of checkpoints, the folder of one, or a plain folder of
            torch.distributed.checkpoint.
        iteration: the number of the checkpoint. None: the newest.

    Returns:
        A dict. "format", "folder" and "iteration" (None for a plain folder); "saved_by": recorded
        arguments of the run, and the number of processes that wrote files; "model": recorded
        arguments of the model's sizes; "entries": a dict for each key; "totals": keys, elements
        and bytes of each part.

    Raises:
        FileNotFoundError: there is no such checkpoint.
        ValueError: it is half-written, damaged, or of another format.
    """
    folder = DcpFolder.open_to_read(path, iteration)
    state = _arguments(folder)
    writers = set()
    for file in folder.folder.iterdir():
        match = _WRITER.fullmatch(file.name)
        if match:
            writers.add(match[1])
    saved_by = {"processes that wrote files": len(writers)}
    saved_by |= _known(state, TOPOLOGY)
    saved_by |= _record(folder.folder)
    entries = [_entry(folder, key) for key in folder.metadata.state_dict_metadata]
    common = folder.folder / COMMON
    if common.is_file():
        entries.append(_described(COMMON, OTHER, common.stat().st_size))
    totals: dict[str, dict[str, int]] = {}
    for entry in entries:
        row = totals.setdefault(entry["part"], {"keys": 0, "elements": 0, "bytes": 0})
        row["keys"] += 1
        row["bytes"] += entry["nbytes"]
        if entry["shape"] is not None:
            row["elements"] += math.prod(entry["shape"])
    return {
        "format": folder.format,
        "folder": str(folder.folder),
        "iteration": None if folder.format == PLAIN else folder.iteration,
        "saved_by": saved_by,
        "model": _known(state, MODEL),
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
    """Returns the differences of two checkpoints. The command `diff` prints them.

    Checkpoints of one format are compared by key. Those of two formats are compared by parameter
    names of the whole model: weights with dtypes, and optimizer state.

    Examples:
        >>> first = save_checkpoint(folder, 1, {"scale": torch.ones(3)})
        >>> second = save_checkpoint(folder, 2, {"scale": torch.tensor([1.0, 1.0, 3.0])})
        >>> [found] = diff(first, second)["values"]
        >>> found["key"], found["differing"], found["largest"]
        ('scale', 1, 2.0)

    Args:
        a: a checkpoint, as for `describe`.
        b: another one.
        iterations: the numbers of both. None: the newest.
        weights_only: True compares weights only.
        values: False compares keys, shapes and dtypes only.
        progress: a function that is called with the progress.

    Returns:
        A dict of lists. "only_a" and "only_b": keys of one of them; "shapes" and "dtypes":
        "KEY: in A, in B"; "values": a dict for each tensor with other bits: its key, its
        number of elements, the number of those that differ, and their largest difference (NaN if
        one is); "objects": keys of other values that differ.

    Raises:
        FileNotFoundError: there is no such checkpoint.
        ValueError: it is half-written, damaged, or of another format.
    """
    iteration_a, iteration_b = iterations
    one = DcpFolder.open_to_read(a, iteration_a)
    other = DcpFolder.open_to_read(b, iteration_b)
    # A plain folder has names of the user's choice.
    by_key = one.format == other.format or PLAIN in (one.format, other.format)
    read = _by_key if by_key else _by_name
    tensors_a, objects_a = read(one, weights_only)
    tensors_b, objects_b = read(other, weights_only)
    shapes = []
    dtypes = []
    comparable = []
    for key, x in tensors_a.items():
        if key not in tensors_b:
            continue
        y = tensors_b[key]
        if x.shape != y.shape:
            shapes.append(f"{key}: {x.shape}, {y.shape}")
        if x.dtype != y.dtype:
            dtypes.append(f"{key}: {_short(x.dtype)}, {_short(y.dtype)}")
        if (x.shape, x.dtype) == (y.shape, y.dtype):
            comparable.append((key, x, y))
    keys_a = {**tensors_a, **objects_a}
    keys_b = {**tensors_b, **objects_b}
    found: dict[str, list[Any]] = {
        "only_a": [key for key in keys_a if key not in keys_b],
        "only_b": [key for key in keys_b if key not in keys_a],
        "shapes": shapes,
        "dtypes": dtypes,
        "values": [],
        "objects": [],
    }
    if not values:
        return found
    total = sum(x.nbytes for _, x, _ in comparable)
    for key, x, y in comparable:
        difference = _compare(key, x, y, lambda nbytes: progress(nbytes, total))
        if difference is not None:
            found["values"].append(difference)
    for key, read_a in objects_a.items():
        if key in objects_b and not same(read_a(), objects_b[key]()):
            found["objects"].append(key)
    return found


def _arguments(folder: DcpFolder) -> Values:
    """The part of the saved state from which `argument_of` reads training arguments. Formats differ
    in where they have them: one object, the common state, or an object for each."""
    if "args" in folder.object_keys:
        return {"args": folder.object("args")}
    if has_common(folder):
        return with_arguments(load_common(folder), folder.folder)
    prefix = "args."
    keys = [key for key in folder.object_keys if key.startswith(prefix)]
    found = {key.removeprefix(prefix): folder.object(key) for key in keys}
    return with_arguments({"args": found}, folder.folder)


def _record(folder: Path) -> Values:
    """The values of the save's record, flat; empty without a record."""
    values = read_record(folder) or {}
    plain = {name: value for name, value in values.items() if not isinstance(value, Mapping)}
    topology = values.get("topology", {})
    return {**plain, **topology, **values.get("versions", {})}


def _known(state: Values, names: Sequence[str]) -> Values:
    """The training arguments of these names that a checkpoint has."""
    found = {name: argument_of(state, name) for name in names}
    return {name: value for name, value in found.items() if value is not None}


def _entry(folder: DcpFolder, key: str) -> Values:
    """The description of a stored key, as `_described` makes it."""
    part = _PARTS.get(key.split(".")[0], OTHER)
    if folder.format == PLAIN and _OPTIMIZER_NAME.search(key):
        part = OPTIMIZER
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
    key: str,
    part: str,
    nbytes: int,
    shape: Shape | None = None,
    dtype: str | None = None,
    pieces: int = 1,
) -> Values:
    """The description of a key as a dict. part: weights, optimizer or other; nbytes: size of a
    tensor's elements, or of an object as stored; pieces: number of stored chunks."""
    return {
        "key": key,
        "part": part,
        "shape": shape,
        "dtype": dtype,
        "nbytes": nbytes,
        "pieces": pieces,
    }


_Contents = tuple[Tensors, dict[str, Callable[[], Any]]]
"""Key -> tensor, and key -> the function that reads an object."""


def _by_key(folder: DcpFolder, weights_only: bool) -> _Contents:
    """The contents by stored key; of the common state, by the name of each of its values."""
    tensors = {key: folder.tensor(key) for key in folder.tensor_keys}
    if weights_only:
        weights = (key for key in tensors if _entry(folder, key)["part"] == WEIGHTS)
        return {key: tensors[key] for key in weights}, {}
    objects: dict[str, Callable[[], Any]] = {}
    for key in folder.object_keys:
        if key != OBJECT:
            objects[key] = functools.partial(folder.object, key)
    if has_common(folder):
        for name, value in load_common(folder).items():
            # A default argument, because a closure would see the last value of the loop.
            objects[f"common state: {name}"] = lambda value=value: value  # type: ignore[misc]
    return tensors, objects


def _by_name(folder: DcpFolder, weights_only: bool) -> _Contents:
    """Weights and optimizer state by kind and parameter name, which all formats share. Steps are
    compared as objects."""
    state = state_of(folder, weights_only)
    tensors = {f"weights.{name}": tensor for name, tensor in state.weights.items()}
    for name, moments in state.moments.items():
        for kind, moment in moments.items():
            tensors[f"{kind}.{name}"] = moment
    steps = {f"step.{name}": step.item for name, step in state.steps.items()}
    return tensors, steps


def _compare(
    key: str, a: LazyTensor, b: LazyTensor, advance: Callable[[int], object]
) -> Values | None:
    """The row of `diff`'s values for two tensors of one shape and dtype, None if their bits are
    equal. advance: called with the bytes of each block."""
    differing = 0
    largest = 0.0
    for box in blocks(a.shape, a.dtype.itemsize, BLOCK_BYTES):
        x = a.block(box)
        y = b.block(box)
        advance(x.nbytes)
        bits_x = _bits(x)
        bits_y = _bits(y)
        if torch.equal(bits_x, bits_y):
            continue
        differing += int((bits_x != bits_y).sum())
        gap = (x.double() - y.double()).abs().max().item()
        largest = gap if math.isnan(gap) else max(largest, gap)
    if differing == 0:
        return None
    return {"key": key, "elements": a.numel, "differing": differing, "largest": largest}


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The elements as integers, a flat tensor: NaNs are equal only if their bits are."""
    return tensor.reshape(-1).view(_INTEGERS[tensor.dtype.itemsize])


def same(a: Any, b: Any) -> bool:
    """True if two values are equal; tensors and arrays in them are compared bit by bit."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        return torch.equal(_bits(a), _bits(b))
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
