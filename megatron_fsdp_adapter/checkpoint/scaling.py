"""Scales and histories of FP8's delayed scaling, which are optional in a checkpoint.

A load reads those that the checkpoint has, with the stored length of history. Missing ones are
removed from the state, so that the loader sees which are missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from .names import FP8_SCALING
from .state import entries


def fit_scaling(stored: dict[str, Any], metadata: Metadata) -> None:
    """Changes a nested state in place: records that the checkpoint does not have are removed, and
    one of another length is replaced by a tensor of the stored length."""
    for holder, name, key in list(entries(stored)):
        if not name.endswith(FP8_SCALING):
            continue
        saved = metadata.state_dict_metadata.get(key)
        if not isinstance(saved, TensorStorageMetadata):
            del holder[name]
        elif saved.size[1:] == holder[name].shape[1:] and saved.size != holder[name].shape:
            holder[name] = torch.empty(saved.size, device=holder[name].device)


def taken_over(wanted: Mapping[str, Any], loaded: Mapping[str, Any]) -> Mapping[str, Any]:
    """`wanted`, a flat part of a state, with exactly the `loaded` scaling records; `wanted` itself
    if it has none."""
    if not any(key.endswith(FP8_SCALING) for key in wanted):
        return wanted
    kept = {key: value for key, value in wanted.items() if not key.endswith(FP8_SCALING)}
    return kept | {key: loaded[key] for key in wanted if key in loaded and key not in kept}
