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


@dataclass(frozen=True)
class PerRank:
    """A value of this rank alone, such as its RNG state: any picklable object.

    It is stored under `<key>.rank_<rank>`; a load returns each rank's value, without the wrapper,
    and ignores the value in the state passed to it.
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
        return "\n".join(
            f"  {title} ({len(keys)}):\n" + "\n".join(f"    {key}" for key in keys)
            for title, keys in titles
            if keys
        )


def merge(parts: Iterable[Mismatch]) -> Mismatch:
    """The union of the parts, each line once, in order of first appearance."""
    listed = list(parts)
    return Mismatch(
        *(
            tuple(dict.fromkeys(line for part in listed for line in getattr(part, field.name)))
            for field in fields(Mismatch)
        )
    )


def to_stored(
    state: Mapping[str, Any], rank: int, is_loading: bool = False
) -> dict[str, Any]:
    """A copy of the nested state with only values that torch DCP can store.

    Containers are new and tensors are the same objects, so a load writes into the caller's storage
    and does not change the caller's containers. `PerRank(v)` at key k becomes {rank_<rank>: bytes},
    with empty bytes if `is_loading`. Raises pickle's error for a `PerRank` value that cannot be
    pickled.
    """

    def stored(value: Any, _: str) -> Any:
        if not isinstance(value, PerRank):
            return value
        return {_rank_key(rank): b"" if is_loading else _to_bytes(value.value)}

    return mapped(state, stored)  # type: ignore[no-any-return]


def from_stored(loaded: Mapping[str, Any], state: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """Undoes `to_stored`. state: the original, which has the `PerRank` wrappers."""
    return {key: _restored(loaded[key], state[key], rank) for key in state}


def flatten(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted key -> leaf, by torch DCP's own rules. Raises ValueError if two leaves share a key."""
    return flatten_state_dict(dict(stored))[0]


def mapped(value: Any, change: Callable[[Any, str], Any], path: str = "") -> Any:
    """Nested dicts and lists, new ones, with `change(leaf, dotted path)` for each leaf."""
    if isinstance(value, Mapping):
        return {key: mapped(entry, change, f"{path}{key}.") for key, entry in value.items()}
    if isinstance(value, list):
        return [mapped(entry, change, f"{path}{i}.") for i, entry in enumerate(value)]
    return change(value, path.removesuffix("."))


def entries(state: Mapping[str, Any], path: str = "") -> Iterator[tuple[Any, str, str]]:
    """(containing dict, its key, dotted key) of every leaf in nested dicts."""
    for name, value in state.items():
        if isinstance(value, Mapping):
            yield from entries(value, f"{path}{name}.")
        else:
            yield state, name, f"{path}{name}"


def problems_of(state: Mapping[str, Any]) -> tuple[str, ...]:
    """Problems that prevent storing or loading a nested state in place, one line per key."""
    found = [f"{path}: keys must be strings" for path in _bad_keys(state, "")]
    if found:
        return tuple(found)
    return tuple(
        f"{key}: {why}" for key, leaf in flatten(state).items() if (why := _unusable(leaf))
    )


def compare(leaves: Mapping[str, Any], metadata: Metadata) -> Mismatch:
    """Differences of this rank's leaves from the stored ones; `unexpected` stays empty."""
    stored = metadata.state_dict_metadata
    wanted = {key: stored[key] for key in leaves if key in stored}
    whole: dict[Any, bool] = {}  # tensors that are cut alike share their list of blocks
    for entry in wanted.values():
        if isinstance(entry, TensorStorageMetadata) and _cut(entry) not in whole:
            whole[_cut(entry)] = _is_whole(entry)
    different = (
        f"{key}: {why}"
        for key, entry in wanted.items()
        if (why := _difference(leaves[key], entry, whole))
    )
    return Mismatch(
        missing=tuple(key for key in leaves if key not in stored), different=tuple(different)
    )


def _cut(entry: TensorStorageMetadata) -> tuple[int, torch.Size]:
    return id(entry.chunks), entry.size


def _is_whole(entry: TensorStorageMetadata) -> bool:
    """True if the stored blocks cover every element once. A load would not write uncovered
    elements."""
    blocks = ((tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks)
    return tile(((0,) * len(entry.size), tuple(entry.size)), blocks)


def general_keys(leaves: Mapping[str, Any], rank: int) -> tuple[str, ...]:
    """The keys, sorted, with `rank_*` for this rank's own: the same on ranks of equal structure."""
    own = f".{_rank_key(rank)}"
    return tuple(sorted(key.removesuffix(own) + _ANY_RANK * key.endswith(own) for key in leaves))


def keys_of_all(general: Iterable[str], size: int) -> frozenset[str]:
    """The keys that `size` ranks with these general keys have together."""
    keys = set(general)
    mine = {key for key in keys if key.endswith(_ANY_RANK)}
    prefixes = [key.removesuffix(_ANY_RANK) for key in mine]
    of_ranks = {f"{prefix}.{_rank_key(rank)}" for prefix in prefixes for rank in range(size)}
    return frozenset(keys - mine | of_ranks)


def _restored(loaded: Any, value: Any, rank: int) -> Any:
    if isinstance(value, PerRank):
        return torch.load(io.BytesIO(loaded[_rank_key(rank)]), weights_only=False)
    if isinstance(value, Mapping):
        # Keys removed before the load (`fitting.py`) are not in the checkpoint.
        return {key: _restored(loaded[key], value[key], rank) for key in value if key in loaded}
    if isinstance(value, list) and len(value) == len(loaded):
        return [_restored(a, b, rank) for a, b in zip(loaded, value, strict=True)]
    # A loaded DTensor may be a view of a part of the caller's DTensor, so return the caller's.
    return value if isinstance(value, DTensor) else loaded


def _rank_key(rank: int) -> str:
    return f"rank_{rank:05d}"


def _to_bytes(value: Any) -> bytes:
    # bytes, so that torch DCP sees one leaf even where the value is a dict with tensors in it
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def _bad_keys(value: Any, path: str) -> list[str]:
    """Paths whose last key is no string: torch DCP would return it as a string."""
    if isinstance(value, Mapping):
        bad = [f"{path}{key!r}" for key in value if not isinstance(key, str)]
        return bad + [p for k, entry in value.items() for p in _bad_keys(entry, f"{path}{k}.")]
    if isinstance(value, list):
        return [p for i, entry in enumerate(value) for p in _bad_keys(entry, f"{path}{i}.")]
    return []


def _unusable(leaf: Any) -> str:
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
    has_tensor = isinstance(stored, TensorStorageMetadata)
    if has_tensor != isinstance(leaf, torch.Tensor):
        return f"stored as {'a tensor' if has_tensor else 'an object'}, wanted as the other kind"
    if not has_tensor:
        return ""
    if stored.size != leaf.size():
        return f"stored with shape {tuple(stored.size)}, wanted with {tuple(leaf.size())}"
    if stored.properties.dtype != leaf.dtype:
        return f"stored as {stored.properties.dtype}, wanted as {leaf.dtype}"
    if not whole[_cut(stored)]:
        return "the stored blocks overlap or leave a gap. The checkpoint is damaged"
    return ""
