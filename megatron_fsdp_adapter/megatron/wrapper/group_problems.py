"""Problems of the process groups that the wrapper receives.

Each function returns one line for each problem, so that the wrapper can raise all at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from .process_groups import group_named, has_groups

Ranks = Mapping[str, tuple[int, ...]]
"""Global ranks of this rank's groups, by their names in ProcessGroupCollection."""

SIZES: Mapping[str, str] = {
    "tp": "tensor_model_parallel_size", "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size", "ep": "expert_model_parallel_size",
    "expt_tp": "expert_tensor_parallel_size",
}  # fmt: skip
"""A group -> the field of the model config with its size."""
CHECKED = (*SIZES, "dp_cp", "expt_dp")
ONLY_WITH_EXPERTS = ("expt_tp", "expt_dp")

CROSSING: tuple[tuple[str, str], ...] = (
    ("tp", "dp_cp"), ("pp", "dp_cp"), ("tp", "pp"),
    ("ep", "expt_dp"), ("expt_tp", "expt_dp"), ("pp", "expt_dp"), ("ep", "expt_tp"),
)  # fmt: skip
"""Groups along different axes of one grid: a rank's two groups share only that rank."""


def group_ranks(pg_collection: Any | None) -> Ranks:
    """The ranks of the groups that exist, in the collection or in `parallel_state`."""
    names = CHECKED if has_groups(pg_collection) else ()
    groups = {name: group_named(pg_collection, name) for name in names}
    return {
        name: tuple(dist.get_process_group_ranks(group))
        for name, group in groups.items()
        if isinstance(group, dist.ProcessGroup)
    }


def group_problems(config: Any, ranks: Ranks) -> list[str]:
    """Groups that contradict the model config, or are not of one grid of ranks. Without these
    checks training would run with different weights on ranks of other axes."""
    with_experts = bool(getattr(config, "num_moe_experts", None))
    used = {
        name: found for name, found in ranks.items()
        if with_experts or name not in ONLY_WITH_EXPERTS
    }  # fmt: skip
    return [
        *_sizes_unlike_config(config, used),
        *_overlapping(used),
        *_outside_data_parallel(used),
        *(_unlike_dense_ranks(used) if with_experts else ()),
    ]


def _sizes_unlike_config(config: Any, ranks: Ranks) -> list[str]:
    return [
        f"{option}={getattr(config, option, 1)}, but the {name} process group has "
        f"{len(ranks[name])} ranks {list(ranks[name])}. Initialize the groups with the sizes of "
        "the model config"
        for name, option in SIZES.items()
        if name in ranks and len(ranks[name]) != getattr(config, option, 1)
    ]


def _overlapping(ranks: Ranks) -> list[str]:
    me = dist.get_rank()
    return [
        f"process groups {first}={list(ranks[first])} and {second}={list(ranks[second])} share "
        f"ranks {sorted(set(ranks[first]) & set(ranks[second]))}, expected [{me}]. Make the "
        "groups of one grid of ranks, each along a different axis"
        for first, second in CROSSING
        if first in ranks and second in ranks and set(ranks[first]) & set(ranks[second]) - {me}
    ]


def _outside_data_parallel(ranks: Ranks) -> list[str]:
    outside = sorted(set(ranks.get("cp", ())) - set(ranks.get("dp_cp", ranks.get("cp", ()))))
    return [
        f"process group dp_cp={list(ranks['dp_cp'])} lacks the ranks {outside} of "
        f"cp={list(ranks['cp'])}, but weights are sharded over data- and context-parallel ranks. "
        "Pass the group of both as dp_cp"
    ] if outside else []


def _unlike_dense_ranks(ranks: Ranks) -> list[str]:
    """A problem if tp x dp_cp and expt_tp x ep x expt_dp differ: both are the ranks of a pipeline
    stage."""
    dense, of_experts = ("tp", "dp_cp"), ("expt_tp", "ep", "expt_dp")
    if not all(name in ranks for name in (*dense, *of_experts)):
        return []
    totals = [math.prod(len(ranks[name]) for name in names) for names in (dense, of_experts)]
    if totals[0] == totals[1]:
        return []
    sizes = {name: list(ranks[name]) for name in (*dense, *of_experts)}
    return [
        f"process groups {sizes}: tp x dp_cp has {totals[0]} ranks, but expt_tp x ep x expt_dp "
        f"has {totals[1]}. Set expert_model_parallel_size and expert_tensor_parallel_size so that "
        "their product divides the number of ranks"
    ]
