"""Makes the index of one wrapper from the process groups that Megatron has made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps

from ...core.distributed_index import FSDPDistributedIndex
from ...core.duplicate_groups import duplicate_group
from ..compat import core_api

Groups = dict[str, dist.ProcessGroup | None]

GROUP_SOURCES: Mapping[str, tuple[str, ...]] = {
    # role in the index -> attributes of ProcessGroupCollection, first present one wins
    "dp_group": ("dp_cp",),
    "fsdp_group": ("intra_dp_cp", "dp_cp"),
    "fsdp_group_ag": ("dp_cp_ag",),
    "expt_dp_group": ("expt_dp",),
    "expt_fsdp_group": ("intra_expt_dp", "expt_dp"),
    "expt_fsdp_group_ag": ("expt_dp_ag",),
    "outer_fsdp_group": ("inter_dist_opt",),
    "tp_group": ("tp",),
    "expt_tp_group": ("expt_tp",),
}

GATHER_SOURCES: Mapping[str, str] = {"fsdp_group": "dp_cp_ag", "expt_fsdp_group": "expt_dp_ag"}
"""Role of a shard group -> attribute for the gather group with the same ranks."""

_dense = partial(core_api.without_remat, ps.get_data_parallel_group, with_context_parallel=True)


def _experts(**options: Any) -> Any:
    if ps._EXPERT_DATA_PARALLEL_GROUP is None:
        return None
    return core_api.without_remat(ps.get_expert_data_parallel_group, **options)


def _gathers() -> Any:
    """The dense group for gathers that Megatron-LM makes for --create-all-gather-group, or None."""
    if not core_api.has_separate_all_gather_group():
        return None
    return _dense(independent_all_gather=True)


GETTERS: Mapping[str, Callable[[], Any]] = {
    "tp": ps.get_tensor_model_parallel_group,
    "pp": partial(ps.get_pipeline_model_parallel_group, False),
    "cp": ps.get_context_parallel_group,
    "ep": partial(ps.get_expert_model_parallel_group, False),
    "expt_tp": partial(ps.get_expert_tensor_parallel_group, False),
    "dp_cp": _dense,
    "intra_dp_cp": partial(_dense, partial_data_parallel=True),
    "dp_cp_ag": _gathers,
    "expt_dp": _experts,
    "intra_expt_dp": partial(_experts, partial_expert_data_parallel=True),
    "expt_dp_ag": lambda: None,
    "inter_dist_opt": partial(ps.get_inter_distributed_optimizer_instance_group, False),
}
"""An attribute of ProcessGroupCollection -> the same group of `parallel_state`."""


def has_groups(pg_collection: Any) -> bool:
    """True if there is a collection, or `parallel_state` is set up."""
    return pg_collection is not None or ps.model_parallel_is_initialized()


def group_named(pg_collection: Any, name: str) -> dist.ProcessGroup | None:
    """A group of the collection, or of `parallel_state` if there is no collection; None if the
    group does not exist.

    Attributes are read with `getattr`: megatron-core 0.16.1's class has no `dp_cp_ag` field but
    takes one by assignment, and fields that were never set do not exist.
    """
    if pg_collection is None:
        return GETTERS[name]()
    return getattr(pg_collection, name, None)


def groups_of(pg_collection: Any) -> Groups:
    """The groups by role, of the collection or of `parallel_state`; None where absent."""
    found: Groups = {}
    for role, names in GROUP_SOURCES.items():
        groups = [group_named(pg_collection, name) for name in names]
        found[role] = next((group for group in groups if group is not None), None)
    return found


def read_groups(pg_collection: Any | None, instances: int, separate_gathers: bool) -> Groups:
    """The groups by role: of the collection, or of `parallel_state` if there is no collection.
    ValueError if `parallel_state` has no groups either.

    separate_gathers: makes missing groups for gathers, which is collective. They are added to a
    collection, so that the wrapper of the next model chunk finds them. Megatron-LM's
    --create-all-gather-group makes such groups itself only until 0.17, and never those of experts.
    """
    if not has_groups(pg_collection):
        raise ValueError(
            "pg_collection=None, and parallel_state has no groups. Pass a ProcessGroupCollection, "
            "or call parallel_state.initialize_model_parallel() first"
        )
    if pg_collection is not None:
        if separate_gathers:
            create_all_gather_groups(pg_collection)
        return groups_of(pg_collection)
    groups = groups_of(None)
    if instances > 1:  # parallel_state's gather group spans all instances
        groups["fsdp_group_ag"] = None
    if separate_gathers:
        for role, name in GATHER_SOURCES.items():
            if groups[f"{role}_ag"] is None:
                groups[f"{role}_ag"] = duplicate_group(groups[role], name)
    return groups


def _check_instances(groups: Groups, instances: int) -> None:
    """ValueError if the groups were made for another number of optimizer instances."""
    roles = {"fsdp_group": "dp_group", "expt_fsdp_group": "expt_dp_group"}
    for shard_role, everyone_role in roles.items():
        shard = groups[shard_role]
        everyone = groups.get(everyone_role)
        if shard is None or everyone is None:
            continue
        ranks = dist.get_process_group_ranks(shard)
        all_ranks = dist.get_process_group_ranks(everyone)
        if len(ranks) * instances != len(all_ranks) or not set(ranks) <= set(all_ranks):
            raise ValueError(
                f"ddp_config.num_distributed_optimizer_instances={instances}: the "
                f"{len(all_ranks)} ranks {all_ranks} of {GROUP_SOURCES[everyone_role][0]} should "
                f"be split over {instances} instances, but the shard group "
                f"{GROUP_SOURCES[shard_role][0]} has ranks {ranks}. Initialize the groups with "
                f"num_distributed_optimizer_instances={instances}"
            )


def _outer_group(groups: Groups, instances: int) -> dist.ProcessGroup | None:
    """The group over optimizer instances; None for one instance. ValueError for a wrong size."""
    if instances == 1:
        return None
    outer = groups["outer_fsdp_group"]
    found = [] if outer is None else dist.get_process_group_ranks(outer)
    if len(found) != instances:
        raise ValueError(
            f"ddp_config.num_distributed_optimizer_instances={instances}: inter_dist_opt should "
            f"have one rank of each instance, but has ranks {found}. Initialize the groups with "
            f"num_distributed_optimizer_instances={instances}"
        )
    return outer


def build_index(
    groups: Groups,
    *,
    device: torch.device,
    grad_scale_of: Callable[[int], float],
    instances: int = 1,
    shard_outer: bool = False,
) -> FSDPDistributedIndex:
    """The index over `groups` (roles of `GROUP_SOURCES`). `grad_scale_of` maps the number of data
    parallel ranks to the gradient factor; `instances` is the number of optimizer instances, and
    `shard_outer` whether they split the shards again. ValueError names the first group that is
    missing or has other ranks than it should."""
    if groups["fsdp_group"] is None or groups["dp_group"] is None:
        raise ValueError(
            "pg_collection.dp_cp is missing: the wrapper shards over the data x context parallel "
            "group. Pass a ProcessGroupCollection that has it, or none to use parallel_state"
        )
    _check_instances(groups, instances)
    others: dict[str, Any] = dict(groups)
    del others["fsdp_group"]
    others["outer_fsdp_group"] = _outer_group(groups, instances)
    return FSDPDistributedIndex(
        groups["fsdp_group"],
        **others,
        device_type=device.type,
        grad_scale=grad_scale_of(dist.get_world_size(groups["dp_group"])),
        hsdp_outer_dp_shard=shard_outer,
    )


def create_all_gather_groups(pg_collection: Any) -> Any:
    """Gives `pg_collection` communicators of their own for all-gathers: `dp_cp_ag` and, where it
    has expert groups, `expt_dp_ag`; returns it.

    The new groups have the ranks of the groups that they mirror, in the same order. One that is
    there already is kept. Collective over the default process group, as every making of a group
    is. A rank that has no part in the model calls it with an empty collection. (torch can make a
    group among its members alone, but names it after how many groups each of them is in.)

    Raises:
        ValueError: on every rank, when ranks disagree on the members of a group.
    """
    groups = groups_of(pg_collection)
    for role, attribute in GATHER_SOURCES.items():
        mirrored = groups[role] if getattr(pg_collection, attribute, None) is None else None
        created = duplicate_group(mirrored, attribute)
        if created is not None:
            setattr(pg_collection, attribute, created)
    return pg_collection
