"""The attributes that Megatron puts on parameters, in one table.

Megatron sees the optimizer parameter wherever it groups, clips, reduces or names parameters, so
what it marked on the raw one has to be there too. `allreduce` and
`average_gradients_across_tp_domain` decide which group a gradient is reduced over: without them a
reduction is skipped in silence.
"""

from __future__ import annotations

from torch import nn

MARKED_BY_MEGATRON = (
    "allreduce",
    "average_gradients_across_tp_domain",
    "expert_tp",
    "grad_norm_group",
    "is_embedding_or_output_parameter",
    "is_embedding_parameter",
    "is_qkv",
    "partition_dim",
    "partition_stride",
    "pipeline_parallel",
    "sequence_parallel",
    "shared",
    "shared_embedding",
    "tensor_model_parallel",
)
SET_BY_WRAPPER = ("_mcore_tp", "_tensor_parallel_mode", "_tp_duplicated", "_tp_partition_dim")
"""See `tensor_parallel.py`; Megatron's checkpoint code reads them."""


def copy_attributes(raw: nn.Parameter, optimizer: nn.Parameter) -> None:
    """Copies what is set on `raw` to `optimizer`."""
    for name in (*MARKED_BY_MEGATRON, *SET_BY_WRAPPER):
        if hasattr(raw, name):
            setattr(optimizer, name, getattr(raw, name))
