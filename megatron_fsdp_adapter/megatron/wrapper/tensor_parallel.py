"""The way in which tensor parallelism splits a parameter, and the attributes that Megatron reads.

Most layers of core mark their parameters (`tensor_model_parallel`, `partition_dim`). For two kinds
of layers the class of the module that owns the parameter decides:

- Layers of core that were built without being initialized have no marks.
- Layers of Transformer Engine mark a weight as split along dim 0 unless they know better. They do
  not where core splits the weights for them (experts), nor where the weights are whole (`TELinear`
  without a parallel mode).
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
"""Class name of a layer -> modes of its `weight*` and `bias*`; its other parameters are replicated.
Names are used because Transformer Engine may not be installed."""
MARKS_TELL = ("ColumnParallelLinear", "RowParallelLinear", "VocabParallelEmbedding")
"""Layers whose parameters' marks are right if there are any."""

SPLIT_WITHOUT_MARKS = ("softmax_offset",)
"""Parameters with a number for each attention head of this rank, which core does not mark. If they
were taken as replicated, a checkpoint would hold only one rank's numbers."""


def _marked_mode(param: nn.Parameter) -> str | None:
    """The mode that the marks show; None if there are no marks, or the dimension is unknown."""
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

    Marks decide for layers of `MARKS_TELL` and for those that are not in `LAYERS`. A parameter of
    `SPLIT_WITHOUT_MARKS` without marks is split. Otherwise the nearest class of `owner` in `LAYERS`
    decides. Any other parameter is replicated.
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
