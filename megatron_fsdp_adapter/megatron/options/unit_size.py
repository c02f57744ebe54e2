"""Grouping of neighboring layers into units: by the option, or by `default_unit_numel` if unset and
no other option needs single layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...core.engine.partition import UnitPlan
from ...plan.unit_grouping import default_unit_numel
from .cuda_graphs import captures_iteration, captures_layers
from .rules import is_on
from .table import OFFLOAD, PARTS_OF_LAYERS, UNIT_NUMEL, read


def unit_numel(config: Any, ddp_config: Any, layer_numels: Sequence[int]) -> int:
    """Elements up to which layers are grouped; 0: not grouped. config: the model's; layer_numels:
    elements of each layer.

    By default they are not if each layer must be a unit, or if training is not launch-bound."""
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
    joined = [plan for plan in plans if plan.more]
    if not joined:
        return ""
    most = max(joined, key=lambda plan: plan.numel)
    return (
        f"layers are joined by {len(most.modules)} to units of {most.numel} elements "
        f"({UNIT_NUMEL}=0 leaves them apart)"
    )
