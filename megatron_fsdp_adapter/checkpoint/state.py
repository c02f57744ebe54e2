"""Nested state dicts as torch DCP flattens them: dotted keys -> leaves.

Leaves are DTensors, plain tensors and other values, which are pickled. A plain tensor or other
value under the same key on several ranks is assumed to be equal on all and is stored once. A value
of one rank is wrapped in `PerRank`.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from megatron_fsdp_adapter.core.dtensor.chunks import lacks_chunks, tile

_ANY_RANK = ".rank_*"

StateMapping = Mapping[str, Any]
"""A state that is only read: a program's (nested), or a stored one (flat)."""

StateDict = dict[str, Any]
"""A state whose containers belong to this package."""


@dataclass(frozen=True)
class PerRank:
    """Marks a value in a state that each rank has for itself, such as a generator's state.

    It is saved under `<key>.rank_<rank>`. A load returns the value of this rank, without `PerRank`.

    Examples:
        >>> _ = save_checkpoint(folder, 10, {"number": PerRank(dist.get_rank())})
        >>> iteration, state = load_checkpoint(folder, {"number": PerRank()})
        >>> state["number"] == dist.get_rank()
        True

    Attributes:
        value: an object that can be pickled. It is not read in a load.
    """

    value: Any = None


@dataclass(frozen=True)
class Mismatch:
    """The differences of a state from a checkpoint, one line per key. Falsy if there are none.

    missing: in the state, not in the checkpoint; unexpected: in the checkpoint, not in any rank's
    state; different: in both, with another shape, dtype or kind; unusable: cannot be loaded.
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    different: tuple[str, ...] = ()
    unusable: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.different or self.unusable)

    def describe(self) -> str:
        """All keys, grouped by kind of difference."""
        titles = (
            ("missing in the checkpoint", self.missing),
            ("in the checkpoint but not in the state", self.unexpected),
            ("different", self.different),
            ("unusable", self.unusable),
        )
        lines = []
        for title, keys in titles:
            if keys:
                lines.append(f"  {title} ({len(keys)}):")
                lines += [f"    {key}" for key in keys]
        return "\n".join(lines)


def merge(parts: Iterable[Mismatch]) -> Mismatch:
    """The union of the parts, each line once, in order of first appearance."""
    listed = list(parts)
    merged = {}
    for field in fields(Mismatch):
        lines = (line for part in listed for line in getattr(part, field.name))
        merged[field.name] = tuple(dict.fromkeys(lines))
    return Mismatch(**merged)


def to_stored(state: StateMapping, rank: int, is_loading: bool = False) -> StateDict:
    """A copy of the nested state with only values that torch DCP can store.

    Containers are new and tensors are the same objects, so a load writes into the caller's storage
    and does not change the caller's containers. `PerRank(v)` at key k becomes {rank_<rank>: bytes},
    with empty bytes if `is_loading`. Raises pickle's error for a `PerRank` value that cannot be
    pickled.
    """

    def stored(value: Any, _: str) -> Any:
        if not isinstance(value, PerRank):
            return value
        content = b"" if is_loading else _to_bytes(value.value)
        return {_rank_key(rank): content}

    return mapped(state, stored)  # type: ignore[no-any-return]


def from_stored(loaded: StateMapping, state: StateMapping, rank: int) -> StateDict:
    """Undoes `to_stored`. state: the original, which has the `PerRank` wrappers."""
    return {key: _restored(loaded[key], state[key], rank) for key in state}


def flatten(stored: StateMapping) -> StateDict:
    """Dotted key -> leaf, by torch DCP's own rules. Raises ValueError if two leaves share a key."""
    return flatten_state_dict(dict(stored))[0]


def mapped(value: Any, change: Callable[[Any, str], Any], path: str = "") -> Any:
    """Nested dicts and lists, new ones, with `change(leaf, dotted path)` for each leaf."""
    if isinstance(value, Mapping):
        return {key: mapped(entry, change, f"{path}{key}.") for key, entry in value.items()}
    if isinstance(value, list):
        return [mapped(entry, change, f"{path}{i}.") for i, entry in enumerate(value)]
    return change(value, path.removesuffix("."))


def entries(state: StateMapping, path: str = "") -> Iterator[tuple[Any, str, str]]:
    """(containing dict, its key, dotted key) of every leaf in nested dicts."""
    for name, value in state.items():
        if isinstance(value, Mapping):
            yield from entries(value, f"{path}{name}.")
        else:
            yield state, name, f"{path}{name}"


def problems_of(state: StateMapping) -> tuple[str, ...]:
    """Problems that prevent storing or loading a nested state in place, one line per key."""
    found = [f"{path}: keys must be strings" for path in _bad_keys(state, "")]
    if not found:
        for key, leaf in flatten(state).items():
            why = _unusable(leaf)
            if why:
                found.append(f"{key}: {why}")
    return tuple(found)


def compare(leaves: StateMapping, metadata: Metadata) -> Mismatch:
    """Differences of this rank's leaves from the stored ones; `unexpected` stays empty."""
    missing = []
    different = []
    # By cut, `_is_whole`, computed once: tensors that are cut alike share their list of blocks.
    whole: dict[Any, bool] = {}
    for key, leaf in leaves.items():
        entry = metadata.state_dict_metadata.get(key)
        if entry is None:
            missing.append(key)
            continue
        if isinstance(entry, TensorStorageMetadata):
            cut = _cut(entry)
            if cut not in whole:
                whole[cut] = _is_whole(entry)
        why = _difference(leaf, entry, whole)
        if why:
            different.append(f"{key}: {why}")
    return Mismatch(missing=tuple(missing), different=tuple(different))


def _cut(entry: TensorStorageMetadata) -> tuple[int, torch.Size]:
    # A key for the way a stored tensor is cut into blocks, valid while `entry` exists.
    return id(entry.chunks), entry.size


def _is_whole(entry: TensorStorageMetadata) -> bool:
    """True if the stored blocks cover every element once. A load would not write uncovered
    elements."""
    blocks = ((tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks)
    return tile(((0,) * len(entry.size), tuple(entry.size)), blocks)


def general_keys(leaves: StateMapping, rank: int) -> tuple[str, ...]:
    """The keys, sorted, with `rank_*` for this rank's own: the same on ranks of equal structure."""
    own = f".{_rank_key(rank)}"
    general = []
    for key in leaves:
        if key.endswith(own):
            key = key.removesuffix(own) + _ANY_RANK
        general.append(key)
    return tuple(sorted(general))


def keys_of_all(general: Iterable[str], size: int) -> frozenset[str]:
    """The keys that `size` ranks with these general keys have together."""
    keys: set[str] = set()
    for key in general:
        if key.endswith(_ANY_RANK):
            prefix = key.removesuffix(_ANY_RANK)
            keys |= {f"{prefix}.{_rank_key(rank)}" for rank in range(size)}
        else:
            keys.add(key)
    return frozenset(keys)


def _restored(loaded: Any, value: Any, rank: int) -> Any:
    # `from_stored` of one value. value: its original.
    if isinstance(value, PerRank):
        return torch.load(io.BytesIO(loaded[_rank_key(rank)]), weights_only=False)
    if isinstance(value, Mapping):
        # `fitting.py` removes keys that the checkpoint does not have, and adds options that it has.
        added = {key: loaded[key] for key in loaded if key not in value}
        kept = {key: _restored(loaded[key], value[key], rank) for key in value if key in loaded}
        return kept | added
    if isinstance(value, list) and len(value) == len(loaded):
        return [_restored(a, b, rank) for a, b in zip(loaded, value, strict=True)]
    if isinstance(value, DTensor):
        # A loaded DTensor may be a view of a part of the caller's DTensor, so return the caller's.
        return value
    return loaded


def _rank_key(rank: int) -> str:
    return f"rank_{rank:05d}"


def _to_bytes(value: Any) -> bytes:
    # bytes, so that torch DCP sees one leaf even where the value is a dict with tensors in it
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def _bad_keys(value: Any, path: str) -> list[str]:
    """Paths whose last key is no string: torch DCP would return it as a string."""
    bad = []
    if isinstance(value, Mapping):
        bad += [f"{path}{key!r}" for key in value if not isinstance(key, str)]
        children = list(value.items())
    elif isinstance(value, list):
        children = list(enumerate(value))
    else:
        return []
    for key, entry in children:
        bad += _bad_keys(entry, f"{path}{key}.")
    return bad


def _unusable(leaf: Any) -> str:
    # The reason why a leaf cannot be stored or loaded in place; empty if it can.
    if not isinstance(leaf, torch.Tensor):
        return ""
    if leaf.is_meta:
        return "a tensor on the meta device has no data. Materialize it first"
    if lacks_chunks(leaf):
        return (
            "a sharded DTensor that carries no chunks. Make it with dtensor_like from the "
            "parameter it was derived from"
        )
    return ""


def _difference(leaf: Any, stored: Any, whole: Mapping[Any, bool]) -> str:
    # The difference of a leaf from its stored entry; empty if there is none. whole: `_is_whole`,
    # by `_cut`.
    is_tensor = isinstance(stored, TensorStorageMetadata)
    if is_tensor != isinstance(leaf, torch.Tensor):
        kind = "a tensor" if is_tensor else "an object"
        return f"stored as {kind}, wanted as the other kind"
    if not is_tensor:
        return ""
    if stored.size != leaf.size():
        return f"stored with shape {tuple(stored.size)}, wanted with {tuple(leaf.size())}"
    if stored.properties.dtype != leaf.dtype:
        return f"stored as {stored.properties.dtype}, wanted as {leaf.dtype}"
    if not whole[_cut(stored)]:
        return "the stored blocks overlap or leave a gap. The checkpoint is damaged"
    return ""
