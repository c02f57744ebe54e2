"""Tensor-parallel cuts of a parameter, and the attributes that Megatron reads.

Most layers of core mark their parameters (`tensor_model_parallel`, `partition_dim`). Two kinds
are known by the class of the module that owns the parameter: layers of core that were built
without being initialized, which carry no marks; and layers of Transformer Engine, which mark every
weight as cut along dim 0 unless they know of the cut, and they do not where core cuts the weights
for them (experts) or where the weights are whole (`TELinear` without a parallel mode).
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

COLUMN = "column"
ROW = "row"
REPLICATED = "replicated"
"""Modes: which dimension of a parameter is split over the tensor-parallel ranks, if any."""
DIMS: Mapping[str, int | None] = {COLUMN: 0, ROW: 1, REPLICATED: None}


LAYERS: Mapping[str, tuple[str, str]] = {
    "ColumnParallelLinear": (COLUMN, COLUMN),
    "RowParallelLinear": (ROW, REPLICATED),
    "VocabParallelEmbedding": (COLUMN, COLUMN),
    "TELayerNormColumnParallelLinear": (COLUMN, COLUMN),
    "TEColumnParallelLinear": (COLUMN, COLUMN),
    "TERowParallelLinear": (ROW, REPLICATED),
    "TEColumnParallelGroupedLinear": (COLUMN, COLUMN),
    "TERowParallelGroupedLinear": (ROW, REPLICATED),
    "TELinear": (REPLICATED, REPLICATED),
}
"""Modes of a layer's `weight*` and `bias*`; whatever else it holds is replicated. By class name, so
that Transformer Engine need not be there."""
MARKS_TELL = ("ColumnParallelLinear", "RowParallelLinear", "VocabParallelEmbedding")
"""Layers whose parameters have attributes that are right where there are any."""

SPLIT_WITHOUT_MARKS = ("softmax_offset",)
"""Parameters with a number for each attention head of this rank, which core does not mark. Taken
for replicated ones, a checkpoint would hold one rank's."""


def _marked_mode(param: nn.Parameter) -> str | None:
    """The mode in the attributes; None where there are none."""
    if not hasattr(param, "tensor_model_parallel"):
        return None
    if not param.tensor_model_parallel:
        return REPLICATED
    dim = getattr(param, "partition_dim", None)
    if dim == 0:
        return COLUMN
    return ROW if dim == 1 else None


def tensor_parallel_mode(param: nn.Parameter, owner: nn.Module, name: str) -> str:
    """The mode of `param`, which is `owner`'s attribute `name`.

    The nearest class of `owner` in `LAYERS` decides where the parameter is not marked or the
    marks of such a layer do not show; what neither marks nor that table know is replicated.
    """
    names = (cls.__name__ for cls in type(owner).__mro__)
    layer = next((found for found in names if found in LAYERS), None)
    marked = _marked_mode(param)
    if marked is not None and (layer is None or layer in MARKS_TELL):
        return marked
    if marked is None and name in SPLIT_WITHOUT_MARKS:
        return COLUMN
    if layer is None:
        return REPLICATED
    weight, bias = LAYERS[layer]
    if name.startswith("weight"):
        return weight
    return bias if name.startswith("bias") else REPLICATED


def mark_tensor_parallel(param: nn.Parameter, mode: str) -> None:
    """Sets what Megatron's checkpoint code of 0.16.1 and of later versions reads."""
    dim = DIMS[mode]
    marks = vars(param)
    marks["_tensor_parallel_mode"] = mode
    marks["_mcore_tp"] = dim is not None
    marks["_tp_duplicated"] = dim is None
    if dim is not None:
        marks["_tp_partition_dim"] = dim
