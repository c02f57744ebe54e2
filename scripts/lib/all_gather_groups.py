"""A stand-in until `megatron_fsdp_adapter.topology.create_all_gather_groups` exists."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def create_all_gather_groups(pg_collection: Any) -> Any:
    """Sets `dp_cp_ag` and `expt_dp_ag` of the collection to new groups with the ranks of `dp_cp`
    and `expt_dp`, and returns it. Collective over the default group."""
    for source, target in (("dp_cp", "dp_cp_ag"), ("expt_dp", "expt_dp_ag")):
        group = getattr(pg_collection, source, None)
        mine = None if group is None else tuple(dist.get_process_group_ranks(group))
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        for ranks in dict.fromkeys(filter(None, everyone)):
            made = dist.new_group(list(ranks))
            if ranks == mine:
                setattr(pg_collection, target, made)
    return pg_collection
