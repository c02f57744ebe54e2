"""Which neighboring layers are joined to one unit: as many as the option says, and where it says
nothing, so many as `default_unit_numel` does, unless something else asks for single layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...core.engine.partition import UnitPlan
from ...sharding.streamed_optimizer import OPTION as STREAMED
from ...sharding.unit_grouping import default_unit_numel
from .cuda_graphs import captures_iteration, captures_layers
from .support import Rule, is_on

UNIT_NUMEL = "suggested_communication_unit_size"
PARTS_OF_LAYERS = "overlap_moe_expert_parallel_comm"

RULES: tuple[Rule, ...] = (
    Rule(
        UNIT_NUMEL,
        lambda config: (getattr(config, UNIT_NUMEL, None) or 0) < 0,
        "it is a number of elements up to which layers are joined to one unit; leave it unset, or "
        "use 0 (each layer is a unit) or more",
    ),
)
"""Of the DDP config."""


def asked_numel(ddp_config: Any) -> int | None:
    """Elements up to which layers are to be joined, 0 for not at all; None if nobody says."""
    asked = getattr(ddp_config, UNIT_NUMEL, None)
    return None if asked is None else int(asked)


def prefetch_bytes(ddp_config: Any) -> int:
    """Weights that may be gathered ahead beyond the next unit: as much as was asked for. What is
    joined by default is gathered ahead as layers are, one unit at a time."""
    return torch.bfloat16.itemsize * (asked_numel(ddp_config) or 0)


def joins_by_default(config: Any, ddp_config: Any) -> bool:
    """Whether layers are joined where nobody says. Not where each is needed for itself (its own
    graphs, core's schedule of parts of layers), and not where the host does not limit: it launches
    nothing in a graph of the iteration, and waits for the bus that an optimizer in host memory is
    streamed over, of which larger units take more of the device."""
    return not (
        captures_layers(config) or captures_iteration(config)
        or is_on(config, PARTS_OF_LAYERS) or is_on(ddp_config, STREAMED)
    )  # fmt: skip


def unit_numel(config: Any, ddp_config: Any, layer_numels: Sequence[int]) -> int:
    """Elements up to which layers of these many elements are joined; 0 for not at all. `config` is
    the model's."""
    asked = asked_numel(ddp_config)
    if asked is not None:
        return asked
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
