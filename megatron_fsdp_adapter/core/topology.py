"""The ranks over which parameters are sharded, gathered and reduced: axes of process groups.

The engine gets a domain with each parameter group and knows nothing else about process groups. All
is derived from groups that exist. Computing ranks from sizes was rejected: that has to repeat the
order in which the groups were made, and is wrong for another `order` string, a rank offset, or
groups that were made by hand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from megatron_fsdp_adapter.core.comm.managed import Manages

DENSE = "dense"
EXPERT = "expert"
SHARD_DIM = "dp_cp"
OUTER_DIM = "outer_fsdp_dp"
TP_DIM = "tp"


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
class WholeMesh:
    """A mesh with dims for data parallelism and others, over all of which parameters are DTensors.

    shards, replicas: names of the dims over which the shards of a parameter lie, and over which
        these are repeated.
    """

    mesh: DeviceMesh
    shards: tuple[str, ...]
    replicas: tuple[str, ...]

    @property
    def own_dims(self) -> list[int]:
        """The numbers of the dims for data parallelism."""
        names = self.mesh.mesh_dim_names or ()
        return [names.index(name) for name in (*self.replicas, *self.shards)]


@dataclass(frozen=True)
class ShardDomain:
    """The ranks over which parameters of one kind are sharded, gathered and reduced.

    axis: its ranks hold the shards.
    gather_group, reduce_group: have the ranks of `axis` in the same order. They may be separate
        communicators, so that a gather never queues behind a reduction.
    mesh: the device mesh of sharded parameters: (outer,) shard axis(, tensor-parallel axis).
    grad_scale: multiplies the sum of the ranks' gradients, once.
    outer: a second data-parallel axis, across which shards are replicated or split again; None
        without one.
    whole: the mesh of parameters that are DTensors over data-parallel dims, too; None without such.
    manager: torchft's, if this job is one of several replicas that may die and come back. They are
        an outer axis then.
    """

    name: str
    axis: Axis
    gather_group: dist.ProcessGroup
    reduce_group: dist.ProcessGroup
    mesh: DeviceMesh
    grad_scale: float
    outer: Axis | None = None
    whole: WholeMesh | None = None
    manager: Manages | None = None

    def __post_init__(self) -> None:
        shards = list(self.axis.ranks)
        for label, group in (("gather", self.gather_group), ("reduce", self.reduce_group)):
            ranks = list(dist.get_process_group_ranks(group))
            if ranks != shards:
                raise ValueError(
                    f"{label} group of the {self.name} parameters has ranks {ranks}, but their "
                    f"shards lie on ranks {shards}. Pass groups with the same ranks in the same "
                    "order"
                )
        if self.outer is not None and len(set(shards) & set(self.outer.ranks)) != 1:
            raise ValueError(
                f"outer group of the {self.name} parameters has ranks {list(self.outer.ranks)}, "
                f"but their shards lie on ranks {shards}: the two groups must have this rank in "
                "common and no other"
            )
        if self.outer is not None and self.manager is not None:
            raise ValueError(
                f"elastic: the mesh has {self.outer.size} replicas too, which are one job and die "
                "together. Pass a mesh of shards alone, and start a job for each replica"
            )
        if not self.grad_scale > 0:
            raise ValueError(f"grad_scale={self.grad_scale} of {self.name}: must be positive")

    @property
    def has_replicas(self) -> bool:
        """True if gradients are also reduced over an outer axis, or over replicas of torchft's."""
        return self.outer is not None or self.manager is not None

    @property
    def outer_size(self) -> int:
        return 1 if self.outer is None else self.outer.size


Domains = Mapping[str, ShardDomain]
"""Domains by their names."""


def mesh_over(axes: Sequence[Axis], device_type: str) -> DeviceMesh:
    """A device mesh over existing groups, outermost axis first.

    No group is created and nothing is communicated. In every order that megatron-core can make, a
    rank is a sum with one term for each axis: so the groups of this rank determine all others.
    Raises ValueError if that does not give every rank a place of its own.
    """
    names = tuple(axis.name for axis in axes)
    first = axes[0]
    if len(axes) == 1:
        return DeviceMesh.from_group(first.group, device_type, mesh_dim_names=names)
    here = first.ranks[first.rank]
    ranks = []
    for place in product(*(axis.ranks for axis in axes)):
        ranks.append(here + sum(rank - here for rank in place))
    distinct = len(set(ranks)) == len(ranks)
    if not distinct or min(ranks) < 0 or max(ranks) >= dist.get_world_size():
        given = {axis.name: list(axis.ranks) for axis in axes}
        raise ValueError(
            f"the groups {given} of rank {here} do not make a mesh: its ranks would be {ranks}"
        )
    mesh = torch.tensor(ranks, device="cpu").view([axis.size for axis in axes])
    groups = [axis.group for axis in axes]
    return DeviceMesh.from_group(groups, device_type, mesh=mesh, mesh_dim_names=names)
