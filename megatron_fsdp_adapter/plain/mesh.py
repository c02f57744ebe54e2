"""The groups and the devices that a user's device mesh names for sharding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..core.runtime.rank_warnings import warn

MODEL_PARALLEL = ("tp", "pp", "ep", "etp", "tensor", "pipeline", "expert")
"""Names of dims whose ranks have different weights."""


MeshGroups = tuple[dist.ProcessGroup, dist.ProcessGroup | None]
"""The process groups of the shard axis, and of the outer one, None without replicas."""


Ranks = DeviceMesh | dist.ProcessGroup | None
"""The ranks to shard over: a mesh, a process group, or all."""


def rank_count(groups: MeshGroups) -> int:
    """Number of ranks that `groups` have together."""
    shard, outer = groups
    count = dist.get_world_size(shard)
    if outer is not None:
        count *= dist.get_world_size(outer)
    return count


def device_type_of(mesh: Ranks) -> str:
    """The type of the devices that have the shards: the mesh's. Without a mesh it is this machine's
    accelerator, or "cpu" if there is none, as torch's `fully_shard` chooses."""
    if isinstance(mesh, DeviceMesh):
        return mesh.device_type
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return "cpu"
    return accelerator.type


def data_parallel_groups(mesh: Ranks, dims: Any = None) -> MeshGroups:
    """The groups of the shard axis and of the outer one, None without replicas.

    mesh: the ranks to shard over: a process group; a mesh of one dim (shards); of two (replicas,
        shards); either with model-parallel dims, by name, of a single rank; None for all ranks.
    dims: names of the mesh's dims for shards and replicas (torch's `DataParallelMeshDims`), for a
        mesh that has others too.

    Raises:
        ValueError: `mesh` has more dims, two without names, or a dim of several model-parallel
            ranks; or `dims` names none for shards, or leaves out one of several ranks.
    """
    if mesh is None:
        return dist.distributed_c10d._get_default_group(), None
    if not isinstance(mesh, DeviceMesh):
        return mesh, None
    if dims is not None:
        refuse_left_out(mesh, dims)
        shards = _mesh_along(mesh, dims.shard_names)
        replicas = _mesh_along(mesh, dims.replicate_names)
        if shards is None:
            raise ValueError(
                f"dp_mesh_dims={dims}: it names no dim for shards. Name one, or use DDP"
            )
        return shards.get_group(), None if replicas is None else replicas.get_group()
    axes = _axes(mesh)
    if not 1 <= len(axes) <= 2:
        raise ValueError(
            f"mesh={mesh}: {len(axes)} dims for data parallelism are not supported. Pass one dim "
            "(shards), two (replicas, shards), a process group, or dp_mesh_dims of fully_shard"
        )
    if mesh.ndim > 1 and not mesh.mesh_dim_names:
        raise ValueError(
            f"mesh={mesh}: its dims have no names, so tensor parallelism looks like replicas. Give "
            "init_device_mesh mesh_dim_names"
        )
    shard = mesh.get_group(axes[-1])
    if len(axes) == 1:
        return shard, None
    first = mesh.mesh_dim_names[axes[0]]  # type: ignore[index]
    if "shard" in first or first == "fsdp":
        warn(
            f"mesh={mesh}: its dim {first!r} is one of replicas, as the first of two dims. To "
            "shard over both, name both in dp_mesh_dims of fully_shard, or pass mesh._flatten()"
        )
    return shard, mesh.get_group(axes[0])


def data_parallel_mesh(mesh: Ranks, dims: Any = None) -> DeviceMesh | None:
    """The mesh of parameters: `mesh` without its model-parallel dims, or one without names over a
    process group. With `dims` it has their names, as torch's. None if this torch cannot join two
    meshes: the engine makes one then."""
    if dims is not None and isinstance(mesh, DeviceMesh):
        shards = _mesh_along(mesh, dims.shard_names)
        replicas = _mesh_along(mesh, dims.replicate_names)
        if replicas is None or shards is None:
            return shards
        if not hasattr(DeviceMesh, "_concatenate"):
            return None
        return DeviceMesh._concatenate([replicas, shards])
    if not isinstance(mesh, DeviceMesh):
        group, _ = data_parallel_groups(mesh)
        return DeviceMesh.from_group(group, device_type_of(mesh))
    axes = _axes(mesh)
    if len(axes) == mesh.ndim:
        return mesh
    return mesh[tuple(mesh.mesh_dim_names[axis] for axis in axes)]  # type: ignore[index]


def _axes(mesh: DeviceMesh) -> list[int]:
    """The numbers of the data-parallel dims of `mesh`."""
    return [axis for axis in range(mesh.ndim) if not _is_model_parallel(mesh, axis)]


def _is_model_parallel(mesh: DeviceMesh, axis: int) -> bool:
    """True if a dim, by its name, is no axis of data parallelism. ValueError if it has several
    ranks then."""
    names = mesh.mesh_dim_names
    if not names or names[axis] not in MODEL_PARALLEL:
        return False
    count = mesh.size(axis)
    if count > 1:
        raise ValueError(
            f"mesh={mesh}: its dim {names[axis]!r} has {count} ranks, whose weights differ, so "
            "they cannot share shards. Pass the data-parallel dims, as mesh['dp']"
        )
    return True


def refuse_left_out(mesh: DeviceMesh, dims: Any) -> None:
    """ValueError if `dims` leaves out a dim of several ranks: torch takes parameters over all dims
    then, as DTensors or annotated (`spmd_types`)."""
    named = {*dims.shard_names, *dims.replicate_names}
    left_out = []
    for name, size in zip(mesh.mesh_dim_names or (), mesh.shape, strict=False):
        if name not in named and size > 1:
            left_out.append(name)
    if left_out:
        raise ValueError(
            f"dp_mesh_dims={dims}: {left_out} of the mesh have several ranks and are not in it, "
            "but parameters over all dims of a mesh are not supported. Pass the data-parallel dims "
            "alone, as mesh['dp'] (torchtitan: spmd_backend='partial_dtensor')"
        )


def _mesh_along(mesh: DeviceMesh, names: Sequence[str]) -> DeviceMesh | None:
    """A mesh of one dim, of the ranks along all of these dims; None without names."""
    if not names:
        return None
    if len(names) == 1:
        return mesh[names[0]]
    return mesh[tuple(names)]._flatten("_".join(names))
