"""Pure flat-buffer layouts: no process group, no device, no tensor data."""

from .planner import GroupLayout, Placement, Segment, plan_group
from .ranges import (
    EMPTY,
    Box,
    FlatRange,
    flat_range_to_boxes,
    nested_shard_rank,
    split_evenly,
    split_nested,
)
from .spec import (
    ELEMENT_GRANULARITY,
    ParamSpec,
    row_granularity,
    rows_granularity,
    tensor_granularity,
)

__all__ = [
    "ELEMENT_GRANULARITY",
    "EMPTY",
    "Box",
    "FlatRange",
    "GroupLayout",
    "ParamSpec",
    "Placement",
    "Segment",
    "flat_range_to_boxes",
    "nested_shard_rank",
    "plan_group",
    "row_granularity",
    "rows_granularity",
    "split_evenly",
    "split_nested",
    "tensor_granularity",
]
