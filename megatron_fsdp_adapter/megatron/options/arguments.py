"""Problems of the process groups that the wrapper receives.

Each function returns one line for each problem, so that the wrapper can raise all at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state as ps

from ..compat import core_api

Ranks = Mapping[str, tuple[int, ...]]
"""Global ranks of this rank's groups, by their names in ProcessGroupCollection."""


@dataclass(frozen=True)
class GroupRow:
    """A process group: its getter in `parallel_state`, and the field of the model config with its
    size."""

    name: str
    from_parallel_state: Callable[[], Any]
    option: str | None = None
    only_with_experts: bool = False


GROUP_ROWS: tuple[GroupRow, ...] = (
    GroupRow("tp", ps.get_tensor_model_parallel_group, "tensor_model_parallel_size"),
    GroupRow("pp", ps.get_pipeline_model_parallel_group, "pipeline_model_parallel_size"),
    GroupRow("cp", ps.get_context_parallel_group, "context_parallel_size"),
    GroupRow(
        "ep", partial(ps.get_expert_model_parallel_group, False), "expert_model_parallel_size"
    ),
    GroupRow(
        "expt_tp",
        partial(ps.get_expert_tensor_parallel_group, False),
        "expert_tensor_parallel_size",
        only_with_experts=True,
    ),
    GroupRow("dp_cp", partial(core_api.data_parallel_group, with_context_parallel=True)),
    GroupRow(
        "expt_dp", partial(core_api.expert_data_parallel_group, False), only_with_experts=True
    ),
)

CROSSING: tuple[tuple[str, str], ...] = (
    ("tp", "dp_cp"), ("pp", "dp_cp"), ("tp", "pp"),
    ("ep", "expt_dp"), ("expt_tp", "expt_dp"), ("pp", "expt_dp"), ("ep", "expt_tp"),
)  # fmt: skip
"""Groups along different axes of one grid: a rank's two groups share only that rank."""


def group_ranks(pg_collection: Any | None) -> Ranks:
    """The ranks of the groups that exist, in the collection or in `parallel_state`."""
    if pg_collection is None and not ps.model_parallel_is_initialized():
        return {}
    groups = {
        row.name: (
            row.from_parallel_state()
            if pg_collection is None
            else getattr(pg_collection, row.name, None)
        )
        for row in GROUP_ROWS
    }
    return {
        name: tuple(dist.get_process_group_ranks(group))
        for name, group in groups.items()
        if isinstance(group, dist.ProcessGroup)
    }


def group_problems(config: Any, ranks: Ranks) -> list[str]:
    """Groups that contradict the model config, or are not of one grid of ranks. Without these
    checks training would run with different weights on ranks of other axes."""
    with_experts = bool(getattr(config, "num_moe_experts", None))
    names = {row.name for row in GROUP_ROWS if with_experts or not row.only_with_experts}
    used = {name: found for name, found in ranks.items() if name in names}
    return [
        *_sizes_unlike_config(config, used),
        *_overlapping(used),
        *_outside_data_parallel(used),
        *(_unlike_dense_ranks(used) if with_experts else ()),
    ]


def _sizes_unlike_config(config: Any, ranks: Ranks) -> list[str]:
    return [
        f"{row.option}={getattr(config, row.option, 1)}, but the {row.name} process group has "
        f"{len(ranks[row.name])} ranks {list(ranks[row.name])}. Initialize the groups with the "
        "sizes of the model config"
        for row in GROUP_ROWS
        if row.option and row.name in ranks
        and len(ranks[row.name]) != getattr(config, row.option, 1)
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
        f"process groups {sizes}: tp x dp_cp makes {totals[0]} ranks, expected as many from "
        f"expt_tp x ep x expt_dp, found {totals[1]}. Choose expert_model_parallel_size and "
        "expert_tensor_parallel_size whose product divides them"
    ]
