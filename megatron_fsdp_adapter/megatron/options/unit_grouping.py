"""Which neighboring layers are joined to one unit: as many as the option says, and where it says
nothing, so many as `default_unit_numel` does, unless something else asks for single layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...core.engine.partition import UnitPlan
from ...sharding.unit_grouping import default_unit_numel
from .cuda_graphs import captures_iteration, captures_layers
from .rules import is_on
from .table import OFFLOAD, PARTS_OF_LAYERS, UNIT_NUMEL, read


def joins_by_default(config: Any, ddp_config: Any) -> bool:
    """Whether layers are joined where nobody says. Not where each is needed for itself (its own
    graphs, core's schedule of parts of layers), and not where the host does not limit: it launches
    nothing in a graph of the iteration, and waits for the bus that an optimizer in host memory is
    streamed over, of which larger units take more of the device."""
    return not (
        captures_layers(config) or captures_iteration(config)
        or is_on(config, PARTS_OF_LAYERS) or is_on(ddp_config, OFFLOAD)
    )  # fmt: skip


def unit_numel(config: Any, ddp_config: Any, layer_numels: Sequence[int]) -> int:
    """Elements up to which layers of these many elements are joined; 0 for not at all. `config` is
    the model's."""
    asked = read(ddp_config, UNIT_NUMEL)
    if asked is not None:
        return int(asked)
    return default_unit_numel(layer_numels) if joins_by_default(config, ddp_config) else 0


def described(plans: Sequence[UnitPlan]) -> str:
    """What was joined, for the line that the wrapper prints; empty where nothing was."""
    joined = [plan for plan in plans if plan.more]
    if not joined:
        return ""
    most = max(joined, key=lambda plan: plan.numel)
    return (
        f"layers are joined by {len(most.modules)} to units of {most.numel} elements "
        f"({UNIT_NUMEL}=0 leaves them apart); "
    )
