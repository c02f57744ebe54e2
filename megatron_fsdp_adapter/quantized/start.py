"""Checks that weights still have the bytes of the values that they were quantized from.

Transformer Engine keeps the value before quantization beside a weight, for main weights to begin
as. A load into the weight makes other bytes and leaves that value as it was: main weights would
begin as what the layer was initialized with, and the first step would bring it back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from megatron_fsdp_adapter.core.layout.format import BLOCK128, PER_TENSOR

from .params import HIGH_PRECISION, kind_of
from .tables import BLOCK

ROWS = 64
"""Number of rows of a weight that are looked at."""
FAR = 0.5
"""Part of the norm: rounding to 8 bits makes less difference, two unrelated weights make more."""
FINEST = 2.0**-9
"""The least positive value in E4M3: rounding may be wrong by as much, however small weights are."""


def outdated_values(module: nn.Module, is_managed: Callable[[str], bool]) -> list[str]:
    """One line for each weight that was written after it was quantized. MXFP8, with scales of 32
    elements, is not looked at."""
    problems = []
    for name, param in module.named_parameters():
        if is_managed(name) and HIGH_PRECISION in param.__dict__ and _is_outdated(param):
            problems.append(
                f"parameter {name}: its bytes were written after it was made, but the "
                f"high-precision value beside it ({HIGH_PRECISION}), from which main weights "
                "start, was not. Load weights after wrapping, or call its "
                "clear_high_precision_init_val() to start from the quantized values"
            )
    return problems


@torch.no_grad()
def _is_outdated(param: Any) -> bool:
    """True if some of its rows differ by more than rounding from the value beside them."""
    kind = kind_of(type(param))
    if kind is None or kind.format not in (PER_TENSOR, BLOCK128):
        return False
    value = param.__dict__[HIGH_PRECISION]
    count = len(value)
    rows = torch.linspace(0, count - 1, min(ROWS, count)).long()
    scales = getattr(param, kind.scales[0])
    indices = rows.to(scales.device)
    if kind.format is BLOCK128:
        bands = scales[indices // BLOCK].repeat_interleave(BLOCK, 1)
        scales = bands[:, : value.shape[1]]
    data = getattr(param, kind.planes["rowwise"])[indices]
    found = data.view(torch.float8_e4m3fn).float() * scales
    kept = value[rows.to(value.device)].to(scales.device, torch.float32)
    finest = (scales * FINEST).expand_as(kept).norm()
    return bool((found - kept).norm() > FAR * kept.norm() + finest)


@contextmanager
def values_follow(modules: Iterable[nn.Module]) -> Iterator[None]:
    """A context in which a copy into a quantized weight also goes, unrounded, to the value that is
    kept beside it."""
    kept = {}
    for module in modules:
        for param in module.parameters():
            if HIGH_PRECISION in param.__dict__:
                kept[id(param)] = param
    for param in kept.values():
        param.__dict__["copy_"] = functools.partial(_copy_both, param)
    try:
        yield
    finally:
        for param in kept.values():
            del param.__dict__["copy_"]


@torch.no_grad()
def _copy_both(param: Any, source: torch.Tensor, *options: Any, **more: Any) -> Any:
    param.__dict__[HIGH_PRECISION].copy_(source)
    return type(param).copy_(param, source, *options, **more)
