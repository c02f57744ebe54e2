"""Parameters of `fully_shard` that are gathered by functions of their own, as under torch's."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ..core.engine.extensions import REMEDY, missing
from ..plan.module_problems import computes_itself
from ..quantized.params import kind_of

PACKED = "quant_state"
"""Attribute of bitsandbytes' parameters whose elements are 4-bit values in another dtype."""


def is_extended(param: torch.Tensor) -> bool:
    """True if a parameter has gather extensions, or is of a class that computes by itself. Without
    extensions it cannot be gathered, but a program may set these on the local tensor later."""
    if isinstance(param, DTensor):
        return is_extended(param._local_tensor)
    return computes_itself(param) or (len(missing(param)) < 2 and kind_of(type(param)) is None)


def problem_of(param: Any, offloads: bool, dtype: torch.dtype | None) -> str:
    """The reason why a parameter of a class of its own cannot be sharded, and what to do; "" if it
    can.

    param: it, or a DTensor over ranks of tensor parallelism. offloads: main weights are to be in
        host memory. dtype: in which modules compute; None for the parameter's."""
    is_cast = param.is_floating_point() and dtype not in (None, param.dtype)
    if is_cast and hasattr(param, PACKED):
        return (
            f"its {param.dtype} are packed bits ({PACKED}), which a cast to param_dtype={dtype} "
            f"would change. Pack them in {dtype}, or in torch.uint8"
        )
    if isinstance(param, DTensor):
        kind = type(param._local_tensor).__name__
        if not is_extended(param):
            return ""
        return (
            f"it is a DTensor over a {kind}, which is gathered by functions of its own: both at "
            "once are not supported. Use plain weights for tensor parallelism"
        )
    if not is_extended(param):
        return ""
    kind = type(param).__name__
    if offloads:
        return (
            f"its class {kind} is gathered by functions of its own, which do not read host memory. "
            "Leave offload_policy out"
        )
    absent = missing(param)
    if len(absent) == 1:
        return f"its class {kind} has no {absent[0]}. {REMEDY}"
    if param.ndim == 0:
        return f"a scalar of class {kind} has no rows. {REMEDY}"
    return ""
