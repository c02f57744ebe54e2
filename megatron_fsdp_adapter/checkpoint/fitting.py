"""Differences from a checkpoint that the state to be loaded into is fitted to.

- Scales and histories of FP8's delayed scaling are optional. A load reads those that the checkpoint
  has, with the stored length of history. Missing ones are removed from the state, so that the
  loader sees which are missing.
- Options of parameter groups differ between releases of torch and of Megatron, and with overrides.
  A load reads those that the checkpoint has of a parameter. The optimizer decides what they mean.
- Megatron pads the vocabulary to a multiple of the tensor-parallel size (times an option), so the
  same model has embedding and output tables of different lengths under different splits. No token
  uses a padding row, so a load may skip it.
- megatron-core renamed some modules, and wrappers have other "module." prefixes. A state is read
  from a checkpoint with other names by these names (`renamed_like`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from megatron_fsdp_adapter.checkpoint.state import StateDict, StateMapping, entries
from megatron_fsdp_adapter.core.dtensor.parts import first_rows
from megatron_fsdp_adapter.optim.state import COUNT
from megatron_fsdp_adapter.state.names import FP8_SCALING, OPTIMIZER_META, RENAMED, split_depth

_TABLE = re.compile(r"(^|\.)(embedding\.word_embeddings\.weight|output_layer\.(weight|bias))($|\.)")


Renamed = Callable[[str], str]


@dataclass(frozen=True)
class _Renaming:
    """The changes of the names in one part of a state.

    texts: of `RENAMED`; depth: the "module." prefixes that every name gets in place of its own,
    None to keep them."""

    texts: tuple[Renamed, ...] = ()
    depth: str | None = None


def renamed_like(state: StateMapping, keys: Iterable[str]) -> StateDict:
    """`state` in new containers, with the texts of `RENAMED` and the "module." prefixes that are in
    `keys`.

    A part of a state (`_part_of`) has only the newer or only the older text. Most releases of
    megatron-core have one of them in all parts. Megatron-LM 0.20 saves models and optimizer state
    under the older one, and options of parameter groups under the newer. The prefixes of a part
    follow from the wrappers. Float16Module adds one to optimizer state, and version 2 of Megatron's
    wrapper has one fewer than version 1 and ours."""
    others: dict[str, list[str]] = {}
    for key in keys:
        others.setdefault(_part_of(key), []).append(key)
    own: dict[str, list[str]] = {}
    for _, _, key in entries(state):
        own.setdefault(_part_of(key), []).append(key)
    renamings = {part: _renaming(part, own[part], others.get(part, ())) for part in own}
    return _with_keys(state, "", renamings)  # type: ignore[no-any-return]


def _part_of(key: str) -> str:
    """The first word of a key, or the first two: "model", "optimizer.state"."""
    return ".".join(key.split(".", 2)[: 2 if key.startswith("optimizer.") else 1])


def _renaming(part: str, own: Sequence[str], others: Sequence[str]) -> _Renaming:
    """The changes by which the keys `own` of a part become like `others`."""
    text = " ".join(own)
    other = " ".join(others)
    texts = []
    for renaming in RENAMED:
        newer, older = renaming.to_newer, renaming.to_older
        for change, opposite in ((newer, older), (older, newer)):
            if change(text) != text and change(other) == other != opposite(other):
                texts.append(change)
    own_depths, depths = _depths(part, own), _depths(part, others)
    is_other = len(own_depths) == len(depths) == 1 and own_depths != depths
    return _Renaming(tuple(texts), depths.pop() if is_other else None)


def _depths(part: str, keys: Iterable[str]) -> set[str]:
    """The "module." prefixes of the names in these keys of a part."""
    return {split_depth(key.removeprefix(f"{part}."))[0] for key in keys}


def _with_keys(value: Any, path: str, renamings: Mapping[str, _Renaming]) -> Any:
    """`value`, which is at a path of a state, with the keys that each part's renaming gives."""
    if not isinstance(value, Mapping):
        return value
    found = {}
    for key, entry in value.items():
        at = f"{path}{key}"
        renaming = renamings.get(_part_of(at), _Renaming())
        for change in renaming.texts:
            key = change(key)
        if renaming.depth is not None and path == f"{_part_of(at)}.":
            key = renaming.depth + split_depth(key)[1]
        found[key] = _with_keys(entry, f"{at}.", renamings)
    return found


def fit(stored: StateDict, metadata: Metadata, vocab_size: int | None) -> None:
    """Changes a nested state in place to what can be read from a checkpoint.

    - A scaling record that the checkpoint does not have is removed.
    - A scaling record of another length is replaced by a tensor of the stored length.
    - The options of a parameter's group become those that the checkpoint has for it, if it has any.
      The step count stays: without it, Adam would start again at 0.
    - A vocabulary table of another length than the stored one, or its optimizer state, is replaced
      by a view of the rows that both have. Its other rows keep their values.

    vocab_size: number of real rows. If either table has fewer rows, or if this is None, the table
    is not changed; `compare` then reports its length. Raises ValueError unless it is positive or
    None.
    """
    if vocab_size is not None and vocab_size < 1:
        raise ValueError(f"vocab_size={vocab_size} must be the number of real tokens, 1 or more")
    _fit_options(stored, metadata)
    for holder, name, key in list(entries(stored)):
        value = holder[name]
        is_scaling = name.endswith(FP8_SCALING)
        saved = metadata.state_dict_metadata.get(key)
        if not isinstance(saved, TensorStorageMetadata):
            if is_scaling:
                del holder[name]
            continue
        size = saved.size
        if getattr(value, "shape", ())[1:] != size[1:]:
            continue  # `compare` reports it
        if is_scaling and size != value.shape:
            holder[name] = torch.empty(size, device=value.device)
        elif vocab_size is not None and isinstance(value, DTensor) and is_table(key):
            rows = size[0]
            own = value.shape[0]
            common = min(rows, own)
            if rows != own and common >= vocab_size:
                holder[name] = first_rows(value, common, rows)


def _fit_options(stored: StateDict, metadata: Metadata) -> None:
    meta: Any = stored
    for part in OPTIMIZER_META.split("."):
        meta = meta.get(part, {}) if isinstance(meta, dict) else {}
    if not meta:
        return
    prefix = f"{OPTIMIZER_META}."
    saved: dict[str, set[str]] = {}
    for key, entry in metadata.state_dict_metadata.items():
        if key.startswith(prefix) and not isinstance(entry, TensorStorageMetadata):
            name, _, option = key.removeprefix(prefix).rpartition(".")
            saved.setdefault(name, set()).add(option)
    for name, options in meta.items():
        known = saved.get(name, set())
        if not known:
            continue  # `compare` reports it
        for option in options.keys() - known - {COUNT}:
            if f"{prefix}{name}.{option}" not in metadata.state_dict_metadata:
                del options[option]
        for option in known - options.keys():
            options[option] = None


def is_table(name: str) -> bool:
    """True if a key, or the global name of a parameter, names a vocabulary table."""
    return bool(_TABLE.search(name))


def taken_over(wanted: StateMapping, loaded: StateMapping) -> StateMapping:
    """`wanted`, a flat part of a state, with exactly the `loaded` scaling records; `wanted` itself
    if it has none."""
    if not any(key.endswith(FP8_SCALING) for key in wanted):
        return wanted
    kept = {key: value for key, value in wanted.items() if not key.endswith(FP8_SCALING)}
    scaling = {key: loaded[key] for key in wanted if key in loaded and key not in kept}
    return kept | scaling
