"""How tensor parallelism cuts a parameter, and the attributes that Megatron reads.

Most layers of core mark their parameters (`tensor_model_parallel`, `partition_dim`). Two kinds
are known by the class of the module that owns the parameter: layers of core that were built
without being initialized, which carry no marks; and layers of Transformer Engine, which mark every
weight as cut along dim 0 unless they know of the cut, and they do not where core cuts the weights
for them (experts) or where the weights are whole (`TELinear` without a parallel mode).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn


class TensorParallelMode(enum.Enum):
    """Which dimension of a parameter is split over the tensor-parallel ranks, if any."""

    COLUMN = "column"
    ROW = "row"
    REPLICATED = "replicated"

    @property
    def dim(self) -> int | None:
        return {"column": 0, "row": 1, "replicated": None}[self.value]


@dataclass(frozen=True)
class LayerRule:
    """Modes of a layer's `weight*` and `bias*`; whatever else it holds is replicated.

    `marks_tell`: the attributes on its parameters are right where there are any.
    """

    weight: TensorParallelMode
    bias: TensorParallelMode
    marks_tell: bool


def _rule(weight: str, bias: str, marks_tell: bool = False) -> LayerRule:
    return LayerRule(TensorParallelMode(weight), TensorParallelMode(bias), marks_tell)


LAYER_RULES: Mapping[str, LayerRule] = {
    "ColumnParallelLinear": _rule("column", "column", marks_tell=True),
    "RowParallelLinear": _rule("row", "replicated", marks_tell=True),
    "VocabParallelEmbedding": _rule("column", "column", marks_tell=True),
    "TELayerNormColumnParallelLinear": _rule("column", "column"),
    "TEColumnParallelLinear": _rule("column", "column"),
    "TERowParallelLinear": _rule("row", "replicated"),
    "TEColumnParallelGroupedLinear": _rule("column", "column"),
    "TERowParallelGroupedLinear": _rule("row", "replicated"),
    "TELinear": _rule("replicated", "replicated"),
}
"""By class name, so that Transformer Engine need not be there."""

SPLIT_WITHOUT_MARKS = ("softmax_offset",)
"""Parameters with a number for each attention head of this rank, which core does not mark. Taken
for replicated ones, a checkpoint would hold one rank's."""


def _marked_mode(param: nn.Parameter) -> TensorParallelMode | None:
    """What the attributes say; None where there are none."""
    if not hasattr(param, "tensor_model_parallel"):
        return None
    if not param.tensor_model_parallel:
        return TensorParallelMode.REPLICATED
    dim = getattr(param, "partition_dim", None)
    return {0: TensorParallelMode.COLUMN, 1: TensorParallelMode.ROW}.get(dim)  # type: ignore[arg-type]


def tensor_parallel_mode(param: nn.Parameter, owner: nn.Module, name: str) -> TensorParallelMode:
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
        return TensorParallelMode.COLUMN
    if rule is not None and name.startswith("weight"):
        return rule.weight
    if rule is not None and name.startswith("bias"):
        return rule.bias
    return TensorParallelMode.REPLICATED


def mark_tensor_parallel(param: nn.Parameter, mode: TensorParallelMode) -> None:
    """Sets what Megatron's checkpoint code of 0.16.1 and of later versions reads."""
    param._tensor_parallel_mode = mode.value  # type: ignore[attr-defined]
    param._mcore_tp = mode.dim is not None  # type: ignore[attr-defined]
    param._tp_duplicated = mode.dim is None  # type: ignore[attr-defined]
    if mode.dim is not None:
        param._tp_partition_dim = mode.dim  # type: ignore[attr-defined]
