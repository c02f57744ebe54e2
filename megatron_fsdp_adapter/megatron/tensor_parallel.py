"""How tensor parallelism cuts a parameter, and the attributes that Megatron reads.

Most layers of core mark their parameters (`tensor_model_parallel`, `partition_dim`). Two kinds
are known by the class of the module that owns the parameter: layers of core that were built
without being initialized, which carry no marks; and layers of Transformer Engine, which mark every
weight as cut along dim 0 unless they know of the cut, and they do not where core cuts the weights
for them (experts) or where the weights are whole (`TELinear` without a parallel mode).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import nn

COLUMN, ROW, REPLICATED = "column", "row", "replicated"
"""Modes: which dimension of a parameter is split over the tensor-parallel ranks, if any."""
DIMS: Mapping[str, int | None] = {COLUMN: 0, ROW: 1, REPLICATED: None}


class LayerRule(NamedTuple):
    """Modes of a layer's `weight*` and `bias*`; whatever else it holds is replicated.

    `marks_tell`: the attributes on its parameters are right where there are any.
    """

    weight: str
    bias: str
    marks_tell: bool = False


LAYER_RULES: Mapping[str, LayerRule] = {
    "ColumnParallelLinear": LayerRule(COLUMN, COLUMN, marks_tell=True),
    "RowParallelLinear": LayerRule(ROW, REPLICATED, marks_tell=True),
    "VocabParallelEmbedding": LayerRule(COLUMN, COLUMN, marks_tell=True),
    "TELayerNormColumnParallelLinear": LayerRule(COLUMN, COLUMN),
    "TEColumnParallelLinear": LayerRule(COLUMN, COLUMN),
    "TERowParallelLinear": LayerRule(ROW, REPLICATED),
    "TEColumnParallelGroupedLinear": LayerRule(COLUMN, COLUMN),
    "TERowParallelGroupedLinear": LayerRule(ROW, REPLICATED),
    "TELinear": LayerRule(REPLICATED, REPLICATED),
}
"""By class name, so that Transformer Engine need not be there."""

SPLIT_WITHOUT_MARKS = ("softmax_offset",)
"""Parameters with a number for each attention head of this rank, which core does not mark. Taken
for replicated ones, a checkpoint would hold one rank's."""


def _marked_mode(param: nn.Parameter) -> str | None:
    """What the attributes say; None where there are none."""
    if not hasattr(param, "tensor_model_parallel"):
        return None
    if not param.tensor_model_parallel:
        return REPLICATED
    return {0: COLUMN, 1: ROW}.get(getattr(param, "partition_dim", None))  # type: ignore[arg-type]


def tensor_parallel_mode(param: nn.Parameter, owner: nn.Module, name: str) -> str:
    """The mode of `param`, which is `owner`'s attribute `name`.

    The nearest class of `owner` in `LAYER_RULES` decides where the parameter is not marked or the
    marks of such a layer do not tell; what neither marks nor rules know is replicated.
    """
    classes = (LAYER_RULES.get(cls.__name__) for cls in type(owner).__mro__)
    rule = next((found for found in classes if found is not None), None)
    marked = _marked_mode(param)
    if marked is not None and (rule is None or rule.marks_tell):
        return marked
    if marked is None and name in SPLIT_WITHOUT_MARKS:
        return COLUMN
    if rule is not None and name.startswith("weight"):
        return rule.weight
    return rule.bias if rule is not None and name.startswith("bias") else REPLICATED


def mark_tensor_parallel(param: nn.Parameter, mode: str) -> None:
    """Sets what Megatron's checkpoint code of 0.16.1 and of later versions reads."""
    dim = DIMS[mode]
    marks = {"_tensor_parallel_mode": mode, "_mcore_tp": dim is not None,
             "_tp_duplicated": dim is None}  # fmt: skip
    vars(param).update(marks if dim is None else {**marks, "_tp_partition_dim": dim})
