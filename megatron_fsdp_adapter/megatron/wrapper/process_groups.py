"""Makes the index of one wrapper from the process groups that Megatron has made."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps

from ...core.distributed_index import FSDPDistributedIndex
from ...core.duplicate_groups import duplicate_group
from ...core.topology import DENSE, EXPERT
from ..compat import core_api
from ..options.table import EXPERT_INSTANCES, INSTANCES
from .expert_instances import expert_groups

Groups = dict[str, dist.ProcessGroup | None]


class Instances(NamedTuple):
    """The number of optimizer instances, each of which has all parameters of a kind."""

    # Of dense parameters. Megatron makes groups for so many.
    dense: int
    # Of experts.
    experts: int

    def option(self, kind: str) -> tuple[str, int]:
        """The option that sets the number for a kind of parameters, and that number."""
        if kind == DENSE or self.experts == self.dense:
            return INSTANCES, self.dense
        return EXPERT_INSTANCES, self.experts


ONE_INSTANCE = Instances(1, 1)

SHARDS_AMONG: Mapping[str, tuple[str, str]] = {
    DENSE: ("fsdp_group", "dp_group"),
    EXPERT: ("expt_fsdp_group", "expt_dp_group"),
}
"""Kind of parameters -> roles of the group of shards, and of that of all ranks that have them."""

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


def read_groups(pg_collection: Any | None, instances: Instances, separate_gathers: bool) -> Groups:
    """The groups by role: of the collection, or of `parallel_state` if there is no collection.
    ValueError if `parallel_state` has no groups either, or if experts cannot be so many instances.

    separate_gathers: makes missing groups for gathers, which is collective. They are added to a
    collection, so that the wrapper of the next model chunk finds them. Megatron-LM's
    --create-all-gather-group makes such groups itself only until 0.17, and never those of experts.
    """
    if not has_groups(pg_collection):
        raise ValueError(
            "pg_collection=None, and parallel_state has no groups. Pass a ProcessGroupCollection, "
            "or call parallel_state.initialize_model_parallel() first"
        )
    groups = groups_of(pg_collection)
    if pg_collection is None and instances.dense > 1:
        groups["fsdp_group_ag"] = None  # parallel_state's gather group spans all instances
    groups["expt_outer_fsdp_group"] = groups["outer_fsdp_group"]
    again = set()
    if instances.experts != instances.dense and groups["expt_fsdp_group"] is not None:
        given = [groups["expt_fsdp_group"], groups["outer_fsdp_group"]]
        shard, outer = expert_groups(groups["expt_dp_group"], instances.experts, given)
        groups |= {"expt_fsdp_group": shard, "expt_outer_fsdp_group": outer}
        if not _have_same_ranks(shard, groups["expt_fsdp_group_ag"]):
            # A group for gathers among the ranks of one dense instance.
            again = {"expt_fsdp_group"}
    _add_gather_groups(groups, pg_collection, again, separate_gathers)
    return groups


def _have_same_ranks(one: dist.ProcessGroup, other: dist.ProcessGroup | None) -> bool:
    """True if both have the same ranks, or if there is one only."""
    if other is None:
        return True
    return dist.get_process_group_ranks(one) == dist.get_process_group_ranks(other)


def _add_gather_groups(
    groups: Groups, pg_collection: Any | None, again: Collection[str], missing: bool
) -> None:
    """Makes groups for gathers, and adds them to `groups` and to a collection. Collective.

    again: roles whose groups are made in place of the present ones. missing: others are made where
    there is none."""
    for role, attribute in GATHER_SOURCES.items():
        if not missing and role not in again:
            continue
        of_gathers = f"{role}_ag"
        mirrored = groups[role] if groups[of_gathers] is None or role in again else None
        created = duplicate_group(mirrored, attribute)
        if created is None:
            continue
        groups[of_gathers] = created
        if pg_collection is not None:
            setattr(pg_collection, attribute, created)


def _check_instances(groups: Groups, instances: Instances) -> None:
    """ValueError if the groups were made for another number of optimizer instances."""
    for kind, (shard_role, everyone_role) in SHARDS_AMONG.items():
        shard = groups[shard_role]
        everyone = groups.get(everyone_role)
        if shard is None or everyone is None:
            continue
        option, count = instances.option(kind)
        ranks = dist.get_process_group_ranks(shard)
        all_ranks = dist.get_process_group_ranks(everyone)
        if len(ranks) * count != len(all_ranks) or not set(ranks) <= set(all_ranks):
            raise ValueError(
                f"ddp_config.{option}={count}: the "
                f"{len(all_ranks)} ranks {all_ranks} of {GROUP_SOURCES[everyone_role][0]} should "
                f"be split over {count} instances, but the shard group "
                f"{GROUP_SOURCES[shard_role][0]} has ranks {ranks}. Initialize the groups with "
                f"num_distributed_optimizer_instances={count}"
            )


def _outer_group(
    groups: Groups, role: str, instances: Instances, kind: str
) -> dist.ProcessGroup | None:
    """The group over instances of one kind of parameters; None for one instance. ValueError for a
    wrong size."""
    option, count = instances.option(kind)
    if count == 1:
        return None
    outer = groups.get(role)
    found = [] if outer is None else dist.get_process_group_ranks(outer)
    if len(found) != count:
        raise ValueError(
            f"ddp_config.{option}={count}: inter_dist_opt should "
            f"have one rank of each instance, but has ranks {found}. Initialize the groups with "
            f"num_distributed_optimizer_instances={count}"
        )
    return outer


def build_index(
    groups: Groups,
    *,
    device: torch.device,
    grad_scale_of: Callable[[int], float],
    instances: Instances = ONE_INSTANCE,
    shard_outer: bool = False,
    expert_shard_outer: bool = False,
) -> FSDPDistributedIndex:
    """The index over `groups`: those of `read_groups`, or of `groups_of` for one instance.

    grad_scale_of: maps the number of data parallel ranks to the gradient factor. shard_outer,
    expert_shard_outer: whether optimizer instances split the shards again. ValueError names the
    first group that is missing or has other ranks than it should."""
    if groups["fsdp_group"] is None or groups["dp_group"] is None:
        raise ValueError(
            "pg_collection.dp_cp is missing: the wrapper shards over the data x context parallel "
            "group. Pass a ProcessGroupCollection that has it, or none to use parallel_state"
        )
    _check_instances(groups, instances)
    others: dict[str, Any] = dict(groups)
    del others["fsdp_group"]
    others["outer_fsdp_group"] = _outer_group(groups, "outer_fsdp_group", instances, DENSE)
    others["expt_outer_fsdp_group"] = None
    if groups["expt_fsdp_group"] is not None:
        of_experts = _outer_group(groups, "expt_outer_fsdp_group", instances, EXPERT)
        others["expt_outer_fsdp_group"] = of_experts
    return FSDPDistributedIndex(
        groups["fsdp_group"],
        **others,
        device_type=device.type,
        grad_scale=grad_scale_of(dist.get_world_size(groups["dp_group"])),
        hsdp_outer_dp_shard=shard_outer,
        expt_hsdp_outer_dp_shard=expert_shard_outer,
    )


def create_all_gather_groups(pg_collection: Any) -> Any:
    """Adds communicators for all-gathers to a collection of groups, and returns the collection.

    All-gathers and reduce-scatters of one communicator wait for each other. With another one for
    all-gathers they overlap. The new groups, `dp_cp_ag` and (with experts) `expt_dp_ag`, have the
    ranks of `dp_cp` and `expt_dp`. Groups that exist are kept.

    Collective: all ranks of the job call it, those without a part of the model with an empty
    collection.

    Examples:
        >>> groups = create_all_gather_groups(ProcessGroupCollection.use_mpu_process_groups())
        >>> dist.get_process_group_ranks(groups.dp_cp_ag)
        [0, 1]

    Args:
        pg_collection: a `ProcessGroupCollection` of megatron-core. It is changed.

    Raises:
        ValueError: on every rank, if ranks have other members for a group.
    """
    _add_gather_groups(groups_of(pg_collection), pg_collection, again=(), missing=True)
    return pg_collection
