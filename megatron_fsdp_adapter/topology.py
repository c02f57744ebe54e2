"""Every process group, read once.

`FSDPDistributedIndex` maps a *kind* of parameter to the `ShardDomain` over which parameters of
that kind are gathered and reduced. The engine gets a domain with each parameter group and knows
nothing else about groups.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

DENSE, EXPERT = "dense", "expert"

GROUP_SOURCES: Mapping[str, tuple[str, ...]] = {
    # role in the index -> attributes of ProcessGroupCollection, first present one wins
    "fsdp_group": ("dp_cp",),
    "fsdp_group_ag": ("dp_cp_ag",),
    "instance_group": ("intra_dp_cp",),
    "expt_fsdp_group": ("expt_dp",),
    "expt_fsdp_group_ag": ("expt_dp_ag",),
    "tp_group": ("tp",),
}


@dataclass(frozen=True)
class Axis:
    """One axis of a device mesh: its group and this rank's place in it. `ranks` are global."""

    name: str
    group: dist.ProcessGroup
    ranks: tuple[int, ...]
    rank: int

    @property
    def size(self) -> int:
        return len(self.ranks)

    @classmethod
    def of(cls, name: str, group: dist.ProcessGroup) -> Axis:
        """The axis `name` over `group`; raises ValueError when this rank is not a member."""
        rank = dist.get_rank(group)
        if rank < 0:
            raise ValueError(f"{name}: rank {dist.get_rank()} is not a member of this group")
        return cls(name, group, tuple(dist.get_process_group_ranks(group)), rank)


@dataclass(frozen=True)
class ShardDomain:
    """Where parameters of one kind are sharded, gathered and reduced.

    `axis` holds the shards; `gather_group` and `reduce_group` have its ranks in its order and may
    be separate communicators, so that a gather never queues behind a reduction. `grad_scale`
    multiplies the sum of the ranks' gradients, once. `mesh` is the 1-D device mesh of `axis`.
    """

    name: str
    axis: Axis
    gather_group: dist.ProcessGroup
    reduce_group: dist.ProcessGroup
    mesh: DeviceMesh
    grad_scale: float

    def __post_init__(self) -> None:
        for label, group in (("gather", self.gather_group), ("reduce", self.reduce_group)):
            ranks = tuple(dist.get_process_group_ranks(group))
            if ranks != self.axis.ranks:
                raise ValueError(
                    f"{label} group of the {self.name} parameters has ranks {list(ranks)}, but "
                    f"their shards lie on ranks {list(self.axis.ranks)}: both groups must have "
                    "the same ranks in the same order"
                )
        if not self.grad_scale > 0:
            raise ValueError(f"grad_scale={self.grad_scale} of {self.name}: must be positive")


def _mesh(axes: Sequence[Axis], device_type: str) -> DeviceMesh:
    """A device mesh over existing groups, outermost axis first. No group is created."""
    if len(axes) == 1:
        axis = axes[0]
        return DeviceMesh.from_group(
            axis.group, device_type, mesh_dim_names=(axis.name,)
        )
    raise ValueError(f"mesh over {[axis.name for axis in axes]}: only 1-D meshes are built here")


class FSDPDistributedIndex:
    """The groups and meshes of one wrapper, and the getters that Megatron's helpers call.

    Args:
        fsdp_group: shards dense parameters (data x context parallel ranks).
        fsdp_group_ag: optional second communicator with the same ranks, for all-gathers.
        expt_fsdp_group, expt_fsdp_group_ag: the same for expert parameters; None without them.
        tp_group: tensor-parallel group, or None for a world without tensor parallelism.
        device_type: "cuda" or "cpu".
        grad_scale: factor on the sum of gradients, for every kind (an expert gradient already
            sums the tokens of its expert-parallel ranks, so its factor is the dense one).

    Raises:
        ValueError: a gather group whose ranks or order differ from its shard group's.
    """

    dp_shard_dim = "dp_cp"
    tp_dim = "tp"
    dp_outer_dim = None
    use_hybrid_fsdp = False
    hsdp_outer_dp_shard = False

    def __init__(
        self,
        fsdp_group: dist.ProcessGroup,
        *,
        device_type: str,
        grad_scale: float,
        fsdp_group_ag: dist.ProcessGroup | None = None,
        expt_fsdp_group: dist.ProcessGroup | None = None,
        expt_fsdp_group_ag: dist.ProcessGroup | None = None,
        tp_group: dist.ProcessGroup | None = None,
    ) -> None:
        self.fsdp_group, self.fsdp_group_ag = fsdp_group, fsdp_group_ag
        self.expt_fsdp_group, self.expt_fsdp_group_ag = expt_fsdp_group, expt_fsdp_group_ag
        self.tp_group = tp_group
        domains = {DENSE: self._domain(DENSE, fsdp_group, fsdp_group_ag, device_type, grad_scale)}
        if expt_fsdp_group is not None:
            domains[EXPERT] = self._domain(
                EXPERT, expt_fsdp_group, expt_fsdp_group_ag, device_type, grad_scale
            )
        self.domains: Mapping[str, ShardDomain] = domains
        self._tp_mesh = (
            _mesh([Axis.of(self.tp_dim, tp_group)], device_type) if tp_group is not None else None
        )

    def _domain(
        self,
        kind: str,
        group: dist.ProcessGroup,
        gather_group: dist.ProcessGroup | None,
        device_type: str,
        grad_scale: float,
    ) -> ShardDomain:
        axis = Axis.of(self.dp_shard_dim, group)
        return ShardDomain(
            name=kind,
            axis=axis,
            gather_group=group if gather_group is None else gather_group,
            reduce_group=group,
            mesh=_mesh([axis], device_type),
            grad_scale=grad_scale,
        )

    @staticmethod
    def _kind(is_expert_parallel: bool) -> str:
        return EXPERT if is_expert_parallel else DENSE

    def domain(self, kind: str) -> ShardDomain:
        """The domain of parameters of `kind`; ValueError when the groups for it are missing."""
        if kind not in self.domains:
            raise ValueError(
                f"a parameter is of kind {kind!r}, but the process groups give only "
                f"{sorted(self.domains)}: pass expt_dp in pg_collection"
            )
        return self.domains[kind]

    def get_fsdp_group(
        self, is_expert_parallel: bool = False, independent_all_gather: bool = False
    ) -> dist.ProcessGroup:
        """The group of the shards, or with `independent_all_gather` the one gathers run on."""
        domain = self.domain(self._kind(is_expert_parallel))
        return domain.gather_group if independent_all_gather else domain.reduce_group

    def get_dp_group(self, is_expert_parallel: bool = False) -> dist.ProcessGroup:
        """All ranks that hold the same parameters: without an outer axis, the shard group."""
        return self.get_fsdp_group(is_expert_parallel)

    def get_outer_fsdp_group(self) -> None:
        """None: there is no outer data-parallel axis."""
        return None

    def get_root_mesh(self, is_expert_parallel: bool = False) -> DeviceMesh:
        """The mesh that optimizer parameters of this kind live on."""
        return self.domain(self._kind(is_expert_parallel)).mesh

    def get_submesh(
        self, mesh_dim_names: str | Sequence[str], is_expert_parallel: bool = False
    ) -> DeviceMesh:
        """The mesh over the named dims ("dp_cp" or "tp"); ValueError for any other."""
        names = (mesh_dim_names,) if isinstance(mesh_dim_names, str) else tuple(mesh_dim_names)
        meshes = {(self.dp_shard_dim,): self.get_root_mesh(is_expert_parallel)}
        if self._tp_mesh is not None:
            meshes[(self.tp_dim,)] = self._tp_mesh
        if names not in meshes:
            raise ValueError(f"mesh dims {names} are not registered; there are {sorted(meshes)}")
        return meshes[names]


def groups_of(pg_collection: Any) -> dict[str, dist.ProcessGroup | None]:
    """The groups in `pg_collection` by role, None where absent.

    Attributes are read with `getattr`: megatron-core 0.16.1's class has no `dp_cp_ag` field but
    takes one by assignment, and fields that were never set do not exist.
    """
    return {
        role: next(
            (
                group
                for group in (getattr(pg_collection, name, None) for name in names)
                if group is not None
            ),
            None,
        )
        for role, names in GROUP_SOURCES.items()
    }


def _check_one_instance(
    shard_group: dist.ProcessGroup, instance_group: dist.ProcessGroup | None
) -> None:
    """Without an outer axis one optimizer instance spans all data-parallel ranks."""
    if instance_group is None:
        return
    everyone = dist.get_process_group_ranks(shard_group)
    instance = dist.get_process_group_ranks(instance_group)
    if instance != everyone:
        raise ValueError(
            f"ddp_config.num_distributed_optimizer_instances=1, but the groups were made for "
            f"several: intra_dp_cp has ranks {instance} and dp_cp ranks {everyone}; initialise "
            "them with num_distributed_optimizer_instances=1"
        )


def build_index(
    groups: Mapping[str, dist.ProcessGroup | None],
    *,
    device: torch.device,
    grad_scale_of: Callable[[int], float],
) -> FSDPDistributedIndex:
    """The index over `groups` (roles of `GROUP_SOURCES`). `grad_scale_of` maps the number of data
    parallel ranks to the gradient factor. ValueError names the first missing group."""
    shard_group = groups["fsdp_group"]
    if shard_group is None:
        raise ValueError(
            "pg_collection.dp_cp is missing: the wrapper shards over the data x context parallel "
            "group; pass a ProcessGroupCollection that has it, or none to use parallel_state"
        )
    _check_one_instance(shard_group, groups.get("instance_group"))
    return FSDPDistributedIndex(
        shard_group,
        device_type=device.type,
        grad_scale=grad_scale_of(dist.get_world_size(shard_group)),
        fsdp_group_ag=groups["fsdp_group_ag"],
        expt_fsdp_group=groups["expt_fsdp_group"],
        expt_fsdp_group_ag=groups["expt_fsdp_group_ag"],
        tp_group=groups["tp_group"],
    )
