"""Over which ranks parameters are sharded, gathered and reduced: axes of process groups.

The engine gets a domain with each parameter group and knows nothing else about process groups. All
is derived from those that exist. Computing ranks from sizes was rejected: it has to repeat
the order in which the groups were made, and is wrong for another `order` string, a rank offset, or
groups that were made by hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

DENSE, EXPERT = "dense", "expert"
SHARD_DIM, OUTER_DIM, TP_DIM = "dp_cp", "outer_fsdp_dp", "tp"


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
    """The ranks over which parameters of one kind are sharded, gathered and reduced.

    `axis` holds the shards; `gather_group` and `reduce_group` have its ranks in its order and may
    be separate communicators, so that a gather never queues behind a reduction. `outer` is a
    second data-parallel axis, across which shards are replicated or split again; None without
    one. `grad_scale` multiplies the sum of the ranks' gradients, once. `mesh` is the device mesh
    of sharded parameters: (outer,) shard axis(, tensor-parallel axis).
    """

    name: str
    axis: Axis
    gather_group: dist.ProcessGroup
    reduce_group: dist.ProcessGroup
    mesh: DeviceMesh
    grad_scale: float
    outer: Axis | None = None

    def __post_init__(self) -> None:
        for label, group in (("gather", self.gather_group), ("reduce", self.reduce_group)):
            ranks = tuple(dist.get_process_group_ranks(group))
            if ranks != self.axis.ranks:
                raise ValueError(
                    f"{label} group of the {self.name} parameters has ranks {list(ranks)}, but "
                    f"their shards lie on ranks {list(self.axis.ranks)}. Pass groups with the "
                    "same ranks in the same order"
                )
        shared = set(self.axis.ranks) & set(self.outer.ranks if self.outer else ())
        if self.outer is not None and len(shared) != 1:
            raise ValueError(
                f"outer group of the {self.name} parameters has ranks {list(self.outer.ranks)}, "
                f"but their shards lie on ranks {list(self.axis.ranks)}: the two groups must have "
                "this rank in common and no other"
            )
        if not self.grad_scale > 0:
            raise ValueError(f"grad_scale={self.grad_scale} of {self.name}: must be positive")

    @property
    def outer_size(self) -> int:
        return 1 if self.outer is None else self.outer.size


def mesh_over(axes: Sequence[Axis], device_type: str) -> DeviceMesh:
    """A device mesh over existing groups, outermost axis first. No group is created and nothing
    is communicated: ranks of a mesh are a sum of one term an axis, as in every order that
    megatron-core can make, so the rows through this rank determine the rest.

    Raises ValueError when that does not give every rank a place of its own.
    """
    if len(axes) == 1:
        return DeviceMesh.from_group(axes[0].group, device_type, mesh_dim_names=(axes[0].name,))
    here = axes[0].ranks[axes[0].rank]
    ranks = [
        here + sum(rank - here for rank in place) for place in product(*(a.ranks for a in axes))
    ]
    if len(set(ranks)) != len(ranks) or not 0 <= min(ranks) <= max(ranks) < dist.get_world_size():
        raise ValueError(
            f"the groups {({axis.name: list(axis.ranks) for axis in axes})} of rank {here} do not "
            f"make a mesh: its ranks would be {ranks}"
        )
    return DeviceMesh.from_group(
        [axis.group for axis in axes],
        device_type,
        mesh=torch.tensor(ranks).view([axis.size for axis in axes]),
        mesh_dim_names=tuple(axis.name for axis in axes),
    )
