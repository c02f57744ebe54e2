"""The size up to which neighboring layers are grouped into units: the option's, or by default
`default_unit_numel`, unless another option needs single layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...core.engine.partition import UnitPlan
from ...plan.unit_grouping import default_unit_numel
from .cuda_graphs import captures_iteration, captures_layers
from .rules import is_on
from .table import OFFLOAD, PARTS_OF_LAYERS, UNIT_NUMEL, read


def unit_numel(config: Any, ddp_config: Any, layer_numels: Sequence[int]) -> int:
    """Elements up to which layers are grouped; 0: not grouped.

    By default layers are not grouped if each must be a unit, or if training is not launch-bound.

    Args:
        config: the model's.
        layer_numels: elements of each layer.
    """
    asked = read(ddp_config, UNIT_NUMEL)
    if asked is not None:
        return int(asked)
    if captures_layers(config) or is_on(config, PARTS_OF_LAYERS):
        return 0  # each layer must be a unit
    if captures_iteration(config) or is_on(ddp_config, OFFLOAD):
        return 0  # training is not launch-bound
    return default_unit_numel(layer_numels)


def described(plans: Sequence[UnitPlan]) -> str:
    """A description of grouped layers, for the line that the wrapper prints; empty if there are
    none."""
    grouped = [plan for plan in plans if plan.more]
    if not grouped:
        return ""
    largest = max(grouped, key=lambda plan: plan.numel)
    return (
        f"layers are joined by {len(largest.modules)} to units of {largest.numel} elements "
        f"({UNIT_NUMEL}=0 leaves them apart)"
    )
