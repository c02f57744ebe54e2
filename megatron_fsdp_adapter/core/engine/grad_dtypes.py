"""Dtypes in which autograd leaves gradients on unsharded parameters, under torch's FSDP2.

Until torch 2.14 that is the dtype of the parameter. Since 2.15 (`_fsdp_param_group.py` there) it
depends on the dtype of the reduction:

- If that is not wider than the parameter's, gradients are cast to it before they are added up.
- If it is wider, gradients stay as they were computed: in bfloat16, or in float32 where a module
  computes so.
- If it is wider, and the backward is the first of several without a reduction, they are cast to it.
  Those of several uses of the parameter are then added in that dtype.
- If it is wider, those of a DTensor are cast to it: they may be summed over other ranks first.
"""

from __future__ import annotations

from collections.abc import Iterable

from megatron_fsdp_adapter.core.config import MixedPrecisionPolicy

from .partition import ManagedParam, unchecked


def set_grad_dtypes(
    entries: Iterable[ManagedParam], policy: MixedPrecisionPolicy, begins_sums: bool
) -> None:
    """Sets the dtypes of gradients that the next backward leaves. begins_sums: it is the first of
    several without a reduction."""
    if not policy.since_torch_2_15:
        return
    sent = policy.comm_dtype
    for entry in entries:
        own = entry.param.dtype
        if not own.is_floating_point:
            continue
        stays = sent.itemsize > own.itemsize and entry.dtensor is None and not begins_sums
        with unchecked():
            for leaf in (entry.param, entry.in_module):
                leaf.grad_dtype = None if stays else sent  # type: ignore[attr-defined]
