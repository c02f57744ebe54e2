"""Parameters that are DTensors already, over ranks of tensor parallelism.

The engine manages the local tensor of such a parameter, as if it were the parameter. Modules see a
DTensor over that tensor: its gradient is handed over to the local one as soon as it is accumulated.
The sharded parameter is a DTensor over both meshes, as of torch's FSDP2.

    module's parameter      DTensor over (tp,)       local tensor: view of the gathered weights
    managed parameter       a plain one, of no module
    sharded parameter       DTensor over (dp, tp)    local tensor: rows of the main weights
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from megatron_fsdp_adapter.core.dtensor.uneven import dtensor_over

from .partition import ManagedParam, UnitPlan, add_grad

KEEPS_PARTIAL = "_fsdp_keeps_partial"
"""Attribute of a module's DTensor: True while its partial gradients add up over backwards, before
they are summed over the ranks of tensor parallelism. Torch's FSDP2 adds up in this order."""


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
            if entry.dtensor is not None:
                _show_over(entry.dtensor, entry.param)


def _show_over(shown: Any, local: nn.Parameter) -> None:
    spec = shown._spec
    # `detach` shares the count of writes.
    over = dtensor_over(local.detach(), spec.mesh, spec.placements, spec.shape, spec.stride)
    marks = dict(vars(shown))
    torch.utils.swap_tensors(shown, nn.Parameter(over, shown.requires_grad))
    vars(shown).update(marks)
    if shown.requires_grad:
        shown.register_post_accumulate_grad_hook(_handing_over(local))


def _handing_over(local: nn.Parameter) -> Callable[[Any], None]:
    """A hook that moves the gradient of a module's DTensor to the managed parameter `local`."""

    def hand_over(shown: Any) -> None:
        grad = shown.grad
        is_partial = grad.placements != shown.placements  # of a replicated parameter
        if is_partial and getattr(shown, KEEPS_PARTIAL, False):
            return
        shown.grad = None
        if is_partial:
            grad = grad.redistribute(placements=shown.placements)
        add_grad(local, grad.to_local().detach())

    return hand_over


def sharded_place(
    shown: Any, mesh: DeviceMesh, placements: Sequence[Placement]
) -> tuple[DeviceMesh, list[Placement], Sequence[int], Sequence[int]]:
    """Mesh, placements, shape and stride of the sharded parameter of `shown`, whose local tensor
    is split over `mesh` by `placements`.

    Torch takes an outer mesh dim for the first split of rows. If `shown` is split along rows too,
    that was the first one, which `_StridedShard` says.
    """
    spec = shown._spec
    splits = 1
    for size, placement in zip(spec.mesh.shape, spec.placements, strict=True):
        if isinstance(placement, Shard) and placement.dim == 0:
            splits *= size
    outer: list[Placement] = []
    for placement in placements:
        is_strided = isinstance(placement, Shard) and splits > 1
        outer.append(_StridedShard(0, split_factor=splits) if is_strided else placement)
    both = DeviceMesh._concatenate([mesh, spec.mesh])
    return both, [*outer, *spec.placements], spec.shape, spec.stride


def problem_of(param: DTensor, mesh: DeviceMesh | None) -> str:
    """The reason why a DTensor cannot be sharded over `mesh`, and what to do; empty if it can."""
    over = param.device_mesh
    for placement in param._spec.placements:
        if type(placement) not in (Shard, Replicate):
            return f"its placement {placement} is not supported. Use Shard or Replicate"
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
