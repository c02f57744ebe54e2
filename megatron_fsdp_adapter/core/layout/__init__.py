"""Flat-buffer layouts as pure values: no process group, no device, no tensor data.

May enter: what every rank can compute alone, and alike, from shapes and numbers of ranks.
"""

from .format import BLOCK128, MXFP8, PER_TENSOR, Plane, WeightFormat, plain
from .group import GroupLayout, ParamSpec, Placement, Segment, row_granularity
from .planner import plan_even, plan_group
from .ranges import EMPTY, Box, FlatRange, flat_range_to_boxes, nested_shard_rank, split_evenly

__all__ = [
    "BLOCK128",
    "EMPTY",
    "MXFP8",
    "PER_TENSOR",
    "Box",
    "FlatRange",
    "GroupLayout",
    "ParamSpec",
    "Placement",
    "Plane",
    "Segment",
    "WeightFormat",
    "flat_range_to_boxes",
    "nested_shard_rank",
    "plain",
    "plan_even",
    "plan_group",
    "row_granularity",
    "split_evenly",
]
