"""Sharded parameters, which a call of `fully_shard` puts in the place of a module's own.

    lin.weight    before the call    the original: all rows
                  after the call     a DTensor of torch's: this rank's rows, in memory of their own
                  in a forward       the original again, a view of gathered weights

No engine is needed for that. So optimizers, loads, `to_empty`, initializers and state dicts meet
DTensors of torch's and nothing else until the model runs. The engine then takes over the DTensors,
with the memory that they have: views of it, such as state dicts of before, stay true.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from ..build.building import for_training
from ..build.same_model import raise_if_different
from ..core.dtensor.uneven import dtensor_over
from ..core.engine.extensions import (
    dtensor_of_rows,
    plain_parts,
    rows_of_rank,
    split_along,
    with_extension,
)
from ..core.engine.params import (
    ReshardedDTensor,
    ReshardedParameter,
    mark_as_part_of_buffer,
    refuse_assigned,
)
from ..core.engine.partition import ManagedParam
from ..core.engine.tensor_parallel import (
    OWN_DIMS,
    as_managed,
    sharded_place,
    whole_mesh_of,
)
from ..core.topology import ShardDomain
from ..quantized.params import kind_of
from .accelerate import give_address
from .extended import is_extended
from .mesh import MeshGroups

LABEL = "_fsdp_label"
"""Attribute of an original parameter: its name, for errors."""
WHOLE_TENSORS = "_fsdp_takes_whole_tensors"
"""Attribute of modules that have sharded parameters."""
SHARDED = "_fsdp_sharded"
"""Attribute of an original parameter: the sharded one that took its place."""


class ShardedParam(NamedTuple):
    """A parameter that a call has sharded."""

    # The DTensor that modules show.
    sharded: nn.Parameter
    # The parameter that they had, which has no values while the other is shown. None if modules are
    # to have another one, which gather extensions make.
    original: nn.Parameter | None
    # The ranks that share it.
    domain: ShardDomain
    # The dtype in which it computes, if the call's policy has another one for it than for others.
    computes_in: torch.dtype | None = None


def is_sharded_over(param: Any, domain: ShardDomain) -> bool:
    """True if `param` is a DTensor over the ranks of `domain`, as sharded parameters are."""
    if not isinstance(param, DTensor):
        return False
    whole = whole_mesh_of(param, domain)
    if whole is not None:
        return not all(param.placements[dim].is_replicate() for dim in whole.own_dims)
    own = domain.mesh.mesh_dim_names
    names = param.device_mesh.mesh_dim_names
    return param.device_mesh == domain.mesh or bool(own and names and {*own} < {*names})


def waits_for_run(param: torch.Tensor) -> bool:
    """True for a parameter that is sharded only when the model first runs or is first read: one of
    Transformer Engine's quantized weights, whose values are in other tensors."""
    return kind_of(type(param)) is not None


def placements_over(mesh: DeviceMesh, dim: int = 0) -> list[Placement]:
    """The placements of parameters that are split along `dim`, over (replicas, shards) or
    (shards,)."""
    replicas: list[Placement] = [Replicate()] * (mesh.ndim - 1)
    return [*replicas, Shard(dim)]


@for_training()
def shard_params(
    subject: str,
    entries: Sequence[ManagedParam],
    groups: MeshGroups,
    domain: ShardDomain,
    device: torch.device,
    keep: Callable[[torch.Tensor], torch.Tensor],
    dims: Mapping[int, int] = MappingProxyType({}),
) -> list[ShardedParam]:
    """Puts sharded parameters in the place of those of `entries`. Collective, unless all are on the
    meta device: all ranks get the rows of the first rank's values. keep: brings a rank's rows to
    where they stay. dims: by the id of a parameter that is not split along the first dim, which one
    is.

    Raises:
        ValueError: the parameters of the ranks differ in names, shapes or dtypes.
    """
    ranks = [group for group in groups if group is not None and dist.get_world_size(group) > 1]
    if any(not entry.param.is_meta for entry in entries):
        raise_if_different(subject, [_described(entry) for entry in entries], ranks)
    found = []
    for entry in entries:
        original = entry.param
        own_way = is_extended(original)
        local = _local(original).detach()
        if not local.is_meta:
            local = local.to(device)
            _broadcast(local, ranks)
        if own_way:
            sharded = _sharded_by_its_class(entry, local, groups[0], domain)
        else:
            dim = dims.get(id(original), 0)
            sharded = _sharded(entry, local, groups[0], domain, keep, dim)
        mark_as_part_of_buffer(sharded)
        give_address(sharded)
        if not own_way:  # as of torch's FSDP2, it has nothing of the class
            _copy_marks(original, sharded)
            _empty(original, device)
        vars(original)[LABEL] = f"parameter {entry.fqns[0]}"
        vars(original)[SHARDED] = sharded
        for owner, name in entry.slots:
            owner._parameters[name] = sharded
            _take_whole_tensors(owner)
        found.append(ShardedParam(sharded, None if own_way else original, domain))
    return found


def _described(entry: ManagedParam) -> str:
    param = entry.param
    names = " = ".join(entry.fqns)
    state = "trained" if param.requires_grad else "frozen"
    return f"parameter {names} {tuple(param.shape)} {param.dtype} {state}, {param.is_meta=}"


def _local(param: Any) -> torch.Tensor:
    """The values that this rank has of a parameter."""
    return param._local_tensor if isinstance(param, DTensor) else param


def _broadcast(values: torch.Tensor, groups: Iterable[dist.ProcessGroup]) -> None:
    """Gives all ranks the values of the first one. Along the axes from inside out this reaches
    every rank."""
    for part in plain_parts(values):
        whole = part.contiguous()
        for group in reversed(list(groups)):
            dist.broadcast(whole.view(-1).view(torch.uint8), group=group, group_src=0)
        if whole is not part:
            part.copy_(whole)


def _sharded_by_its_class(
    entry: ManagedParam, local: torch.Tensor, group: dist.ProcessGroup, domain: ShardDomain
) -> Any:
    """The sharded parameter of one whose class has gather extensions. ValueError if the class
    cannot split it."""
    try:
        rows = rows_of_rank(local, dist.get_rank(group), dist.get_world_size(group))
    except Exception as error:
        kind = type(entry.param).__name__
        raise ValueError(
            f"parameter {entry.fqns[0]} (class {kind}) cannot be split into rows: "
            f"{type(error).__name__} in an operator of its class. Pass it in ignored_params, so "
            "that each rank has all of it, or give the class the operators that torch's "
            "fully_shard calls"
        ) from error
    made = dtensor_of_rows(rows, domain.mesh, placements_over(domain.mesh), local.shape)
    return nn.Parameter(made, entry.param.requires_grad)


def _sharded(
    entry: ManagedParam,
    local: torch.Tensor,
    group: dist.ProcessGroup,
    domain: ShardDomain,
    keep: Callable[[torch.Tensor], torch.Tensor],
    dim: int,
) -> Any:
    """The sharded parameter of a plain one, or of a DTensor. Its part of `local` along `dim` has
    memory of its own."""
    original = entry.param
    whole = local.view(1) if local.ndim == 0 else local  # a scalar is one row
    chunks = torch.chunk(whole, dist.get_world_size(group), dim)
    rank = dist.get_rank(group)
    part = chunks[rank] if rank < len(chunks) else whole[:0]
    rows = keep(torch.empty_like(part, memory_format=torch.contiguous_format).copy_(part))
    placements = placements_over(domain.mesh, dim)
    if isinstance(original, DTensor):
        made = dtensor_over(rows, *sharded_place(original, domain, placements))
    else:
        stride = torch.empty(whole.shape, device="meta").stride()
        made = dtensor_over(rows, domain.mesh, placements, whole.shape, stride)
    return nn.Parameter(made, original.requires_grad)


def _copy_marks(original: nn.Parameter, sharded: nn.Parameter) -> None:
    """Gives the sharded parameter the attributes that a program has set on the original."""
    for key, value in vars(original).items():
        if not key.startswith("_fsdp_"):
            setattr(sharded, key, value)


def _empty(original: Any, device: torch.device) -> None:
    """Takes the memory of a parameter. It keeps shape and dtype; reading it raises an error."""
    if original.is_meta:
        return
    local = _local(original)
    nothing = torch.empty((), dtype=local.dtype, device=device).expand(local.shape)
    if isinstance(original, DTensor):
        original._local_tensor = nothing
        original.__class__ = ReshardedDTensor
    else:
        original.data = nothing
        if type(original) is nn.Parameter:
            original.__class__ = ReshardedParameter


def show_tied(entries: Iterable[ManagedParam]) -> None:
    """Puts sharded parameters into further places of their originals: of a weight that is tied to
    one that an earlier call has sharded."""
    for entry in entries:
        sharded = vars(entry.param).get(SHARDED)
        if sharded is not None:
            for owner, name in entry.slots:
                owner._parameters[name] = sharded


def _take_whole_tensors(owner: Any) -> None:
    """Has loads into `owner` take whole tensors, too, where the engine does not do that."""
    if WHOLE_TENSORS not in owner.__dict__:
        owner.__dict__[WHOLE_TENSORS] = True
        owner.register_load_state_dict_pre_hook(_distribute_values)


def _distribute_values(owner: Any, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Puts DTensors over this rank's rows in the place of whole tensors that are to be loaded."""
    for name, param in owner._parameters.items():
        value: Any = state_dict.get(prefix + name)
        is_whole = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
        if not is_whole or not isinstance(param, DTensor) or hasattr(param, "fsdp_layout_ref"):
            continue
        is_plain = all(type(one) in (Shard, Replicate) for one in param.placements)
        if is_plain and not is_extended(param) and value.numel() == param.numel():
            whole = value.detach().view(param.shape).to(param.device_mesh.device_type)
            state_dict[prefix + name] = distribute_tensor(
                whole, param.device_mesh, param.placements, src_data_rank=None
            )


@contextlib.contextmanager
def keeping_params(module: Any) -> Iterator[None]:
    """If other DTensors are put in the place of those in `module` within it, these get what the
    others are, and stay."""
    before = []
    for owner in module.modules():
        for name, param in owner._parameters.items():
            if isinstance(param, DTensor):
                before.append((owner._parameters, name, param))
    yield
    moved = set()
    for params, name, param in before:
        other = params[name]
        if other is not param and isinstance(other, DTensor):
            if id(param) not in moved:
                torch.utils.swap_tensors(param, other)
                moved.add(id(param))
            params[name] = param


def as_before_sharding(
    entry: ManagedParam, found: ShardedParam | None, domain: ShardDomain, device: torch.device
) -> ManagedParam:
    """`entry`, whose parameter is a sharded one, with the parameter that modules are to have in a
    forward: the original of `found`, or a new one if the program has put another DTensor there.

    domain: the ranks that share it. ValueError if that DTensor is sharded in another way;
    RuntimeError if the program has assigned to its `data`.
    """
    sharded: Any = entry.param
    refuse_assigned(sharded, f"data of parameter {entry.fqns[0]}")
    *outer, last = [sharded.placements[dim] for dim in _own_dims(sharded, domain)]
    is_split = isinstance(last, (Shard, _StridedShard))
    if is_split and last.dim == 0 and is_extended(sharded):
        return with_extension(entry, device)
    original = _without_values(sharded, None if found is None else found.original, domain, device)
    original.requires_grad = sharded.requires_grad
    made = as_managed(replace(entry, param=original, sharded=sharded))
    size = domain.axis.size
    is_even = is_split and (last.dim == 0 or made.param.shape[last.dim] % size == 0)
    if not is_even or not all(one.is_replicate() for one in outer):
        raise ValueError(
            f"parameter {entry.fqns[0]}: it was replaced by a DTensor with the placements "
            f"{sharded.placements}. Put one there that is sharded as the former was"
        )
    if last.dim == 0 or size == 1:
        return made
    return split_along(made, last.dim, size)


def _own_dims(sharded: Any, domain: ShardDomain) -> list[int]:
    """The dims of the mesh of a sharded parameter that are for data parallelism, shards last."""
    whole = whole_mesh_of(sharded, domain)
    if whole is not None:
        return whole.own_dims
    names = sharded.device_mesh.mesh_dim_names
    own = domain.mesh.mesh_dim_names
    if not names or not own or not {*own} <= {*names}:
        return list(range(domain.mesh.ndim))
    return [names.index(name) for name in own]


def _place_before(sharded: Any, domain: ShardDomain) -> tuple[DeviceMesh, list[Placement]] | None:
    """Mesh and placements of the DTensor of which `sharded` has rows; None if it was a plain
    tensor."""
    over = sharded.device_mesh
    if over == domain.mesh and whole_mesh_of(sharded, domain) is None:
        return None
    of_dims = dict(zip(over.mesh_dim_names, sharded.placements, strict=True))
    for dim in _own_dims(sharded, domain):
        of_dims[over.mesh_dim_names[dim]] = Replicate()
    whole = domain.whole
    if whole is not None:
        names = whole.mesh.mesh_dim_names or ()
        return whole.mesh, [of_dims.get(name, Replicate()) for name in names]
    dims = domain.mesh.ndim
    return over[tuple(over.mesh_dim_names[dims:])], list(sharded.placements[dims:])


def _noting_own_dims(shown: Any, domain: ShardDomain) -> nn.Parameter:
    """A module's parameter. Notes on a DTensor which dims of its mesh are for data parallelism."""
    whole = whole_mesh_of(shown, domain)
    if whole is not None:
        setattr(shown, OWN_DIMS, whole.own_dims)
    return shown  # type: ignore[no-any-return]


def _without_values(
    sharded: Any, original: Any, domain: ShardDomain, device: torch.device
) -> nn.Parameter:
    """The parameter of which `sharded` has rows, `original` if there is one, in the dtype of the
    rows. It takes no memory."""
    place = _place_before(sharded, domain)
    shape = tuple(sharded.shape)
    if original is not None:
        shape = tuple(_local(original).shape)
    elif place is not None:
        shape = compute_local_shape_and_global_offset(shape, *place)[0]
    nothing = torch.empty((), dtype=sharded.dtype, device=device).expand(shape)
    if original is None:
        made = nothing
        if place is not None:
            made = dtensor_over(nothing, *place, sharded.shape, sharded.stride())
        return _noting_own_dims(nn.Parameter(made), domain)
    if isinstance(original, DTensor):
        _noting_own_dims(original, domain)
        original._local_tensor = nothing
        original.__class__ = DTensor
    elif original.is_meta:
        marks = dict(vars(original))
        torch.utils.swap_tensors(original, nn.Parameter(nothing))
        vars(original).update(marks)
    else:
        if type(original) is ReshardedParameter:
            original.__class__ = nn.Parameter  # type: ignore[assignment]
        original.data = nothing
    return original
