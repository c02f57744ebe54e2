"""Vocabulary tables of another padded length.

Megatron pads the vocabulary to a multiple of the tensor-parallel size (times an option), so the
same model has embedding and output tables of different lengths under different splits. No token
has a padding row: what is in it is free, and a load may skip it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from megatron_fsdp_adapter.checkpoint.parts import first_rows

_TABLE = re.compile(r"(^|\.)(embedding\.word_embeddings\.weight|output_layer\.(weight|bias))($|\.)")


def fit_vocabulary(stored: dict[str, Any], metadata: Metadata, vocab_size: int) -> tuple[str, ...]:
    """Makes the vocabulary tables of a nested state readable from a checkpoint that has them, or
    their optimizer state, with another number of padding rows. Returns the dotted keys changed.

    stored: changed in place; a table of another length than the stored one is replaced by a view
    of the rows that both have, and its rows beyond those keep what they hold. vocab_size: rows
    that are no padding; a table that is shorter on either side stays, and so is a mismatch.
    Raises ValueError unless vocab_size is positive.
    """
    if vocab_size < 1:
        raise ValueError(f"vocab_size={vocab_size} must be the number of real tokens, 1 or more")
    changed = []
    for holder, name, key in list(_tables(stored, "")):
        value = holder[name]
        saved = metadata.state_dict_metadata.get(key)
        if not isinstance(saved, TensorStorageMetadata) or saved.size[1:] != value.shape[1:]:
            continue
        rows, own = saved.size[0], value.shape[0]
        if rows != own and min(rows, own) >= vocab_size:
            holder[name] = first_rows(value, min(rows, own), rows)
            changed.append(key)
    return tuple(changed)


def is_table(name: str) -> bool:
    """Whether a key, or the global name of a parameter, is that of a vocabulary table."""
    return bool(_TABLE.search(name))


def _tables(state: Mapping[str, Any], path: str) -> Iterator[tuple[Any, str, str]]:
    """(dict, its key, dotted key) of every DTensor whose key is that of a vocabulary table."""
    for name, value in state.items():
        key = f"{path}{name}"
        if isinstance(value, Mapping):
            yield from _tables(value, f"{key}.")
        elif isinstance(value, DTensor) and is_table(key):
            yield state, name, key
