"""Parameters that are DTensors already, over ranks of tensor parallelism.

The engine manages the local tensor of such a parameter, as if it were the parameter. Modules see a
DTensor over that tensor: its gradient is handed over to the local one as soon as it is accumulated.
The sharded parameter is a DTensor over both meshes, as of torch's FSDP2.

    module's parameter      DTensor over (tp,)       local tensor: view of the gathered weights
    managed parameter       a plain one, of no module
    sharded parameter       DTensor over (dp, tp)    local tensor: rows of the main weights

A module's parameter may be a DTensor over (dp, tp) itself, replicated over dp. So is its gradient,
or partial over dp, which the reduction sums up: then only the other dims are redistributed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from megatron_fsdp_adapter.core.dtensor.uneven import dtensor_over
from megatron_fsdp_adapter.core.topology import ShardDomain, WholeMesh

from .partition import ManagedParam, UnitPlan, add_grad

KEEPS_PARTIAL = "_fsdp_keeps_partial"
"""Attribute of a module's DTensor: True while its partial gradients add up over backwards, before
they are summed over the ranks of tensor parallelism. Torch's FSDP2 adds up in this order."""
OWN_DIMS = "_fsdp_own_dims"
"""Attribute of a module's DTensor: the dims of its mesh that are for data parallelism."""


def keep_partial(entries: Sequence[ManagedParam], kept: bool) -> None:
    """Sets whether partial gradients of `entries` are kept."""
    for entry in entries:
        if entry.dtensor is not None:
            setattr(entry.dtensor, KEEPS_PARTIAL, kept)


def forget_partial(entries: Sequence[ManagedParam]) -> None:
    """Forgets partial gradients that were kept."""
    for entry in entries:
        if entry.dtensor is not None:
            entry.dtensor.grad = None


def as_managed(entry: ManagedParam) -> ManagedParam:
    """`entry`, whose parameter may be a DTensor, with a plain parameter over the local tensor."""
    given: Any = entry.param
    if not isinstance(given, DTensor):
        return entry
    local = nn.Parameter(given._local_tensor, given.requires_grad)
    return entry.over(local)


def show_gathered(plan: UnitPlan) -> None:
    """Makes modules' DTensors ones over the managed parameters, which are views of flat buffers
    now. Has gradients handed over."""
    for entries in plan.groups.values():
        for entry in entries:
            if entry.dtensor is not None and entry.extension is None:
                show_over(entry.dtensor, entry.param, partial(add_grad, entry.param))


def show_over(shown: Any, local: nn.Parameter, take_grad: Callable[[torch.Tensor], None]) -> None:
    """Makes the DTensor `shown` one over `local`, whose gradients `take_grad` takes."""
    spec = shown._spec
    # `detach` shares the count of writes.
    over = dtensor_over(local.detach(), spec.mesh, spec.placements, spec.shape, spec.stride)
    marks = dict(vars(shown))
    torch.utils.swap_tensors(shown, nn.Parameter(over, shown.requires_grad))
    vars(shown).update(marks)
    if shown.is_floating_point():  # torch registers hooks on trained ones only, and it may be later
        is_trained = shown.requires_grad
        shown.requires_grad = True
        shown.register_post_accumulate_grad_hook(_handing_over(take_grad))
        shown.requires_grad = is_trained


def _handing_over(take_grad: Callable[[torch.Tensor], None]) -> Callable[[Any], None]:
    """A hook that gives the gradient of a module's DTensor to `take_grad`."""

    def hand_over(shown: Any) -> None:
        grad = shown.grad
        wanted = list(shown.placements)
        for dim in getattr(shown, OWN_DIMS, ()):
            wanted[dim] = grad.placements[dim]
        is_partial = list(grad.placements) != wanted  # of a replicated parameter
        if is_partial and getattr(shown, KEEPS_PARTIAL, False):
            return
        shown.grad = None
        if is_partial:
            grad = grad.redistribute(placements=wanted)
        take_grad(grad.to_local().detach())

    return hand_over


def whole_mesh_of(param: Any, domain: ShardDomain) -> WholeMesh | None:
    """The mesh of `param` if that has the dims for data parallelism, too; else None."""
    whole = domain.whole
    if whole is None or not isinstance(param, DTensor) or param.device_mesh != whole.mesh:
        return None
    return whole


GivenPlace = tuple[DeviceMesh, list[Placement], Sequence[int], Sequence[int]]
"""Mesh, placements, shape and stride of a DTensor."""


def sharded_place(shown: Any, domain: ShardDomain, placements: Sequence[Placement]) -> GivenPlace:
    """The place of the sharded parameter of `shown`, whose local tensor is split over the mesh of
    `domain` by `placements`.

    Torch takes an outer mesh dim for the first split of a dim. If `shown` is split along that dim
    too, that was the first one, which `_StridedShard` says.
    """
    spec = shown._spec
    dim = placements[-1].dim  # type: ignore[attr-defined]
    whole = whole_mesh_of(shown, domain)
    if whole is not None:
        return _place_in_whole(whole, spec, domain.mesh, dim)
    split = _split_after(spec, range(spec.mesh.ndim), dim)
    outer = [split if isinstance(one, Shard) else one for one in placements]
    both = DeviceMesh._concatenate([domain.mesh, spec.mesh])
    return both, [*outer, *spec.placements], spec.shape, spec.stride


def _split_after(spec: Any, axes: Iterable[int], dim: int) -> Placement:
    """The placement of `dim` if that is split after `axes` of the mesh of `spec` have split it."""
    splits = 1
    for axis in axes:
        placement = spec.placements[axis]
        if isinstance(placement, Shard) and placement.dim == dim:
            splits *= spec.mesh.size(axis)
    return _StridedShard(dim, split_factor=splits) if splits > 1 else Shard(dim)


def _place_in_whole(whole: WholeMesh, spec: Any, over: DeviceMesh, dim: int) -> GivenPlace:
    """The place of the sharded parameter of one with `spec`, over the whole mesh. Several dims of
    shards are one in it, as they are in `over`, the data-parallel mesh. So torch has it."""
    axes = whole.mesh.ndim
    split: dict[str, Placement] = {}
    for axis, name in enumerate(whole.mesh.mesh_dim_names or ()):
        split[name] = spec.placements[axis]
        if name in whole.shards:
            split[name] = _split_after(spec, range(axis + 1, axes), dim)
    if len(whole.shards) == 1:
        return whole.mesh, [*split.values()], spec.shape, spec.stride
    meshes = []
    placements: list[Placement] = []
    for name, placement in split.items():
        if name in whole.replicas or (name in whole.shards and over in meshes):
            continue
        if name in whole.shards:
            meshes.append(over)
            placements += [Replicate()] * (over.ndim - 1)
        else:
            meshes.append(whole.mesh[name])
        placements.append(placement)
    joined = DeviceMesh._concatenate(meshes) if len(meshes) > 1 else over
    return joined, placements, spec.shape, spec.stride


def problem_of(param: DTensor, mesh: DeviceMesh | None, whole: WholeMesh | None) -> str:
    """The reason why a DTensor cannot be sharded over `mesh`, and what to do; empty if it can.

    whole: a mesh that has the dims of `mesh` and others, of parameters over all of them.
    """
    over = param.device_mesh
    for placement in param._spec.placements:
        if type(placement) not in (Shard, Replicate):
            return f"its placement {placement} is not supported. Use Shard or Replicate"
    if whole is not None and over == whole.mesh:
        for dim in whole.own_dims:
            if not param._spec.placements[dim].is_replicate():
                name = over.mesh_dim_names[dim]  # type: ignore[index]
                return (
                    f"it is {param._spec.placements[dim]} over {name!r}, a dim for data "
                    "parallelism. Make it Replicate() there: fully_shard splits it"
                )
        return ""
    if mesh is None or not mesh.mesh_dim_names or not over.mesh_dim_names:
        return "it is a DTensor. Pass the data-parallel mesh, mesh['dp'] of the mesh that has both"
    if not hasattr(DeviceMesh, "_concatenate"):
        return f"it is a DTensor, and torch {torch.__version__} joins no meshes. Use torch 2.13"
    names = {*mesh.mesh_dim_names} & {*over.mesh_dim_names}
    if names:
        return (
            f"it is a DTensor over {sorted(names)}, over which it is to be sharded. Pass the "
            "data-parallel dims alone"
        )
    try:
        DeviceMesh._concatenate([mesh, over])
    except RuntimeError as error:
        return (
            f"it is a DTensor over {over}, which torch cannot join to {mesh}: {error}. Make both "
            "of one init_device_mesh, with names"
        )
    return ""
