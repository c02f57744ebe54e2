"""The groups and the devices that a user's device mesh names for sharding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..core.runtime.rank_warnings import warn
from ..core.topology import WholeMesh

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


def data_parallel_groups(mesh: Ranks) -> MeshGroups:
    """The groups of the shard axis and of the outer one, None without replicas.

    mesh: the ranks to shard over: a process group; a mesh of one dim (shards); of two (replicas,
        shards); either with model-parallel dims, by name, of a single rank; None for all ranks.

    Raises:
        ValueError: `mesh` has more dims, two without names, or a dim of several model-parallel
            ranks.
    """
    if mesh is None:
        return dist.distributed_c10d._get_default_group(), None
    if not isinstance(mesh, DeviceMesh):
        return mesh, None
    axes = [axis for axis in range(mesh.ndim) if not _is_model_parallel(mesh, axis)]
    return _groups_of(mesh, axes)


def groups_by_position(mesh: Ranks, dims: Any = None) -> MeshGroups:
    """The groups of the shard axis and of the outer one of a mesh whose dims are (shards,) or
    (replicas, shards) with any names, as torch's `fully_shard` reads it. A name of model
    parallelism brings a warning.

    dims: names of the mesh's dims for shards and replicas (torch's `DataParallelMeshDims`), for a
        mesh that has others too.

    Raises:
        ValueError: `mesh` has more dims, or two without names; or `dims` names none for shards, or
            one that `mesh` does not have.
    """
    if not isinstance(mesh, DeviceMesh):
        return data_parallel_groups(mesh)
    if dims is None:
        _tell_of_names(mesh)
        return _groups_of(mesh, range(mesh.ndim))
    names = mesh.mesh_dim_names or ()
    unknown = {*dims.shard_names, *dims.replicate_names} - {*names}
    if unknown:
        raise ValueError(
            f"dp_mesh_dims={dims}: the mesh has no dims {sorted(unknown)}. Name some of {names}"
        )
    shards = _mesh_along(mesh, dims.shard_names)
    replicas = _mesh_along(mesh, dims.replicate_names)
    if shards is None:
        raise ValueError(f"dp_mesh_dims={dims}: it names no dim for shards. Name one, or use DDP")
    return shards.get_group(), None if replicas is None else replicas.get_group()


def _groups_of(mesh: DeviceMesh, axes: Sequence[int]) -> MeshGroups:
    """The groups of the dims `axes`, which are (shards,) or (replicas, shards)."""
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


def _tell_of_names(mesh: DeviceMesh) -> None:
    """Warns of a mesh of two dims whose names are not those of replicas and shards."""
    names = mesh.mesh_dim_names or ()
    parallel = [name for name in names if name in MODEL_PARALLEL]
    if len(names) == 2 and parallel:
        warn(
            f"mesh={mesh}: its dims are read by position, {names[0]!r} as replicas and "
            f"{names[1]!r} as shards, but {parallel[0]!r} is a name of model parallelism. If its "
            "ranks have different weights, pass the data-parallel dims alone, as mesh['dp']"
        )


def data_parallel_mesh(mesh: Ranks, dims: Any = None) -> DeviceMesh | None:
    """The mesh of parameters: `mesh`, or one without names over a process group. With `dims` it has
    their names, as torch's. None if this torch cannot join two meshes: the engine makes one then.
    """
    if not isinstance(mesh, DeviceMesh):
        group, _ = data_parallel_groups(mesh)
        return DeviceMesh.from_group(group, device_type_of(mesh))
    if dims is None:
        return mesh
    shards = _mesh_along(mesh, dims.shard_names)
    replicas = _mesh_along(mesh, dims.replicate_names)
    if replicas is None or shards is None:
        return shards
    if not hasattr(DeviceMesh, "_concatenate"):
        return None
    return DeviceMesh._concatenate([replicas, shards])


def whole_mesh(mesh: Ranks, dims: Any) -> WholeMesh | None:
    """The mesh of parameters that are DTensors over all of its dims, of which `dims` are those for
    data parallelism; None without `dims`."""
    if dims is None or not isinstance(mesh, DeviceMesh):
        return None
    return WholeMesh(mesh, tuple(dims.shard_names), tuple(dims.replicate_names))


def left_out_of(whole: WholeMesh) -> list[str]:
    """The dims of several ranks that are not for data parallelism."""
    mesh = whole.mesh
    named = {*whole.shards, *whole.replicas}
    sizes = zip(mesh.mesh_dim_names or (), mesh.shape, strict=True)
    return [name for name, size in sizes if name not in named and size > 1]


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


def _mesh_along(mesh: DeviceMesh, names: Sequence[str]) -> DeviceMesh | None:
    """A mesh of one dim, of the ranks along all of these dims; None without names."""
    if not names:
        return None
    if len(names) == 1:
        return mesh[names[0]]
    return mesh[tuple(names)]._flatten("_".join(names))
