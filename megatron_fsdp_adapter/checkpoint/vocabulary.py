"""Vocabulary tables of another padded length.

Megatron pads the vocabulary to a multiple of the tensor-parallel size (times an option), so the
same model has embedding and output tables of different lengths under different splits. No token
uses a padding row, so a load may skip it.
"""

from __future__ import annotations

import re
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from megatron_fsdp_adapter.checkpoint.parts import first_rows
from megatron_fsdp_adapter.checkpoint.state import entries

_TABLE = re.compile(r"(^|\.)(embedding\.word_embeddings\.weight|output_layer\.(weight|bias))($|\.)")


def fit_vocabulary(stored: dict[str, Any], metadata: Metadata, vocab_size: int) -> None:
    """Fits the vocabulary tables of a nested state, and their optimizer state, to a checkpoint with
    another number of padding rows.

    stored: changed in place; a table of another length than the stored one is replaced by a view of
    the rows that both have, and its other rows keep their values. vocab_size: number of real rows;
    a table that is shorter on either side is not changed, and is a mismatch. Raises ValueError
    unless vocab_size is positive.
    """
    if vocab_size < 1:
        raise ValueError(f"vocab_size={vocab_size} must be the number of real tokens, 1 or more")
    for holder, name, key in list(entries(stored)):
        value = holder[name]
        if not isinstance(value, DTensor) or not is_table(key):
            continue
        saved = metadata.state_dict_metadata.get(key)
        if not isinstance(saved, TensorStorageMetadata) or saved.size[1:] != value.shape[1:]:
            continue
        rows, own = saved.size[0], value.shape[0]
        if rows != own and min(rows, own) >= vocab_size:
            holder[name] = first_rows(value, min(rows, own), rows)


def is_table(name: str) -> bool:
    """True if a key, or the global name of a parameter, names a vocabulary table."""
    return bool(_TABLE.search(name))
