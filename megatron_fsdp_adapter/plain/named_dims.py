"""The groups behind named dims of a mesh, as `megatron_fsdp` has them."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..core.distributed_index import FSDPDistributedIndex as Index
from ..core.distributed_index import OptionalGroup

OF_EXPERTS = (
    "experts cannot be sharded over ranks of their own. Leave it out, or use Megatron's wrapper, "
    "FullyShardedDataParallel"
)


def _group(mesh: DeviceMesh, option: str, name: str | None) -> dist.ProcessGroup:
    """The process group of the dim `name` of `mesh`, which may be a flattened one."""
    try:
        return mesh[name].get_group()  # type: ignore[index]
    except (KeyError, TypeError, RuntimeError):
        raise ValueError(
            f"{option}={name!r}: the mesh has only the dims {mesh.mesh_dim_names}. Name one of "
            "them, or a dim that they were flattened to"
        ) from None


class NamedDimsIndex(Index):
    """The groups behind named dims of a mesh.

    Args:
        tp_dim: must exist in the mesh; nothing else needs it.
        hybrid_fsdp_group: the ranks of both data-parallel dims, which `get_dp_group` returns.
            Nothing else needs it.
        hsdp_outer_dp_shard: whether the outer dim is sharded over; no effect without one.
        hybrid_fsdp_expt_group, expt_fsdp_group_ag: have no effect.

    Raises:
        ValueError: a dim that the mesh does not have, `hybrid_fsdp_group` without `dp_outer_dim`,
            or a mesh of experts.
    """

    def __init__(
        self,
        device_mesh: DeviceMesh,
        dp_shard_dim: str | None = None,
        dp_outer_dim: str | None = None,
        tp_dim: str | None = None,
        hybrid_fsdp_group: OptionalGroup = None,
        hybrid_fsdp_expt_group: OptionalGroup = None,
        hsdp_outer_dp_shard: bool = False,
        expt_device_mesh: DeviceMesh | None = None,
        fsdp_group_ag: OptionalGroup = None,
        expt_fsdp_group_ag: OptionalGroup = None,
    ) -> None:
        if expt_device_mesh is not None:
            raise ValueError(f"expt_device_mesh={expt_device_mesh}: {OF_EXPERTS}")
        if dp_outer_dim is None and hybrid_fsdp_group is not None:
            raise ValueError(
                "hybrid_fsdp_group: dp_outer_dim is None, so there is one data-parallel dim. Set "
                "dp_outer_dim too, or leave the group out"
            )
        if tp_dim is not None:
            _group(device_mesh, "tp_dim", tp_dim)
        shard = _group(device_mesh, "dp_shard_dim", dp_shard_dim)
        outer = None if dp_outer_dim is None else _group(device_mesh, "dp_outer_dim", dp_outer_dim)
        super().__init__(
            shard,
            device_type=device_mesh.device_type,
            grad_scale=1.0,
            fsdp_group_ag=fsdp_group_ag,
            outer_fsdp_group=outer,
            dp_group=hybrid_fsdp_group,
            hsdp_outer_dp_shard=hsdp_outer_dp_shard and outer is not None,
        )
        self._mesh = device_mesh
        # The names of dims that were given.
        self.dp_shard_dim = dp_shard_dim  # type: ignore[assignment]
        self.dp_outer_dim = dp_outer_dim  # type: ignore[assignment]
        self.tp_dim = tp_dim  # type: ignore[assignment]

    def get_root_mesh(self, is_expert_parallel: bool = False) -> DeviceMesh:
        """The mesh that was given."""
        return self._mesh

    def get_submesh(self, mesh_dim_names: Any, is_expert_parallel: bool = False) -> DeviceMesh:
        """The part of the given mesh over the named dims."""
        return self._mesh[mesh_dim_names]
