"""Records of delayed scaling among the entries of a state dict."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..core.engine.params import ParamPair
from ..quantized.scaling import Scaling, scalings_of
from .names import EXTRA_STATE, FP8_SCALING


def take_scaling(scalings: Mapping[str, Scaling], records: Mapping[str, torch.Tensor]) -> None:
    """Loads the records, by key, into the `scalings` of the same keys.

    Prints on rank 0 for how many loaded weights the scale is still unknown."""
    for name, record in records.items():
        scalings[name].load(record)
    unknown = [name for name, scaling in scalings.items() if scaling.is_unknown]
    if unknown and dist.get_rank() == 0:
        first = unknown[0].removesuffix(FP8_SCALING)
        print(
            f"load_state_dict: no delayed scaling state for {len(unknown)} FP8 weights "
            f"({first}, ...). Their scales are set from the amax "
            "of the loaded main weights",
            flush=True,
        )


def forget_scaling(
    pairs: Iterable[ParamPair], child: nn.Module, state: Mapping[str, Any], prefix: str
) -> None:
    """Makes the scaling of the weights that a load into `child` writes unknown, unless the load has
    scales: those are in the extra state of TE's module, which loads it itself.

    pairs: of the weights of `child`; state, prefix: as torch gives them to a load hook."""
    extra = state.get(prefix + EXTRA_STATE)
    if isinstance(extra, torch.Tensor) and extra.numel():
        return
    written = []
    for pair in pairs:
        if any(owner is child and prefix + name in state for owner, name in pair.managed.slots):
            written.append(pair)
    for scaling in scalings_of(written):
        scaling.forget()
