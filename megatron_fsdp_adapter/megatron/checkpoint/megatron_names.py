"""What Megatron's checkpoint code calls by name, for DTensors that know their chunks.

Megatron's `fsdp_dtensor` path imports helpers from its bundled engine. Those find out where a
shard lies by asking all ranks, once per tensor and dimension, and hang when ranks hold different
tensors. These functions have the same names and signatures, take the answer from the layout, and
never communicate; only those whose purpose it is, to make a whole tensor, do.
`install()` puts them in the places of the originals.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate

from megatron_fsdp_adapter.checkpoint.chunks import LayoutRef, lacks_chunks
from megatron_fsdp_adapter.checkpoint.parts import dtensor_of_piece
from megatron_fsdp_adapter.checkpoint.state import flatten
from megatron_fsdp_adapter.dtensor import whole_tensor

LAYOUT_REF = "fsdp_layout_ref"
_SOURCE = "fsdp_split_source"
_TP_ATTRIBUTES = (
    "tensor_model_parallel",
    "partition_dim",
    "partition_stride",
    "_mcore_tp",
    "_tp_partition_dim",
    "_tp_duplicated",
    "_tensor_parallel_mode",
)


def preprocess_state_dict_for_uneven_dtensor(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Checks that torch DCP can save and load every DTensor of a nested state; returns it.

    Nothing is left to prepare: what our wrapper and optimizer put into a state dict carries its
    chunks. Raises ValueError naming every sharded DTensor that does not.
    """
    missing = [key for key, leaf in flatten(state_dict).items() if lacks_chunks(leaf)]
    if missing:
        raise ValueError(
            f"{len(missing)} sharded DTensors carry no chunks: {', '.join(missing)}. Take the "
            "state from state_dict_for_save_checkpoint() and the optimizer's sharded_state_dict()"
        )
    return state_dict


def copy_tensor_model_parallel_attributes(
    destination_tensor: torch.Tensor, source_tensor: torch.Tensor
) -> None:
    """Core's function of this name, for the SwiGLU split only: it also notes the source.

    There the destination is a piece, on the meta device, of the shape of a sharded parameter,
    and is all that `make_fsdp_dtensor` gets to know about that parameter.
    """
    for name in _TP_ATTRIBUTES:
        if hasattr(source_tensor, name):
            setattr(destination_tensor, name, getattr(source_tensor, name))
    setattr(destination_tensor, _SOURCE, source_tensor)


def make_fsdp_dtensor(
    local_tensor: torch.Tensor,
    param: torch.Tensor,
    dist_index: object,
    is_sharded_param: bool = True,
    is_expert_param: bool = False,
    run_check: bool = False,
    update_uneven_dtensor_chunk_meta: bool = False,
    force_sync_tp_duplicated_param: bool = False,
) -> DTensor:
    """The DTensor of a piece of a sharded parameter, over a view of a sharded value of it.

    local_tensor: this rank's elements of the piece, flat or in rows; its storage is used.
    param: the piece's shape on this tensor-parallel rank, a meta tensor that went through
    `copy_tensor_model_parallel_attributes`; its storage offset says where in the parameter it
    lies. Mesh and placements are the parameter's, so `dist_index` and `is_expert_param` tell
    nothing new; `run_check` and `update_uneven_dtensor_chunk_meta` ask for what is always done.

    Raises ValueError if the piece's parameter is unknown or not one of ours, if the piece is not
    one run of the parameter's elements, or if this rank holds another number of its elements
    than `local_tensor` has.
    """
    del dist_index, is_expert_param, run_check, update_uneven_dtensor_chunk_meta
    if not is_sharded_param or force_sync_tp_duplicated_param:
        raise ValueError(
            f"is_sharded_param={is_sharded_param} and force_sync_tp_duplicated_param="
            f"{force_sync_tp_duplicated_param} are not supported. Leave them at their defaults"
        )
    source = getattr(param, _SOURCE, None)
    ref = getattr(source, LAYOUT_REF, None)
    if not isinstance(source, DTensor) or not isinstance(ref, LayoutRef):
        raise ValueError(
            f"the sharded parameter behind a piece of shape {tuple(param.shape)} is unknown or "
            "was not made by megatron_fsdp_adapter. To use Megatron's engine, call uninstall() "
            "first"
        )
    if not param.is_contiguous():
        raise ValueError(f"a piece of stride {param.stride()} is not contiguous")
    return dtensor_of_piece(
        source, ref, local_tensor.view(-1), tuple(param.shape), int(param.storage_offset())
    )


def uneven_dtensor_to_full_tensor(dtensor: DTensor) -> torch.Tensor:
    """The whole tensor on every rank of the mesh, by `whole_tensor`. From 0.18 on core calls this.

    Raises ValueError if it is no DTensor, or sharded and its place in the whole is unknown.
    """
    if not isinstance(dtensor, DTensor):
        raise ValueError(f"{type(dtensor).__name__} is not a DTensor")
    return whole_tensor(dtensor)


def gather_uneven_dtensor_to_full_tensor(
    dtensor: DTensor, target_device: torch.device | None = None
) -> DTensor:
    """The whole tensor on every rank of the mesh, as a DTensor replicated over it.

    By `whole_tensor`. target_device: where the result goes (None: where `dtensor` is).
    Raises ValueError for a device of another type than the mesh's, and for a sharded DTensor
    whose place in the whole is unknown.
    """
    if not isinstance(dtensor, DTensor):
        raise ValueError(f"{type(dtensor).__name__} is not a DTensor")
    device_type = dtensor.device_mesh.device_type
    if target_device is not None and torch.device(target_device).type != device_type:
        raise ValueError(
            f"target_device={target_device}: a DTensor is on the devices of its mesh, here "
            f"{device_type}. Move the result's to_local() instead"
        )
    full, mesh = whole_tensor(dtensor), dtensor.device_mesh
    full = full.to(target_device or full.device)
    return DTensor.from_local(full, mesh, [Replicate()] * mesh.ndim, run_check=False)


def redistribute_uneven_dtensor_to_replicated(dtensor: DTensor) -> DTensor:
    """`gather_uneven_dtensor_to_full_tensor` under its name from 0.18 on. A function of its own:
    what is rebound is found again by identity."""
    return gather_uneven_dtensor_to_full_tensor(dtensor)


def is_mcore_tensor_model_parallel(param: torch.Tensor) -> bool:
    """True if the parameter is one slice of a tensor that is split over tensor-parallel ranks.

    Transformer Engine marks whole weights as slices too; `_tp_duplicated` knows better.
    """
    if getattr(param, "_tp_duplicated", False):
        return False
    return any(bool(getattr(param, name, False)) for name in ("_mcore_tp", "tensor_model_parallel"))


def get_mcore_tensor_parallel_partition_dim(param: torch.Tensor) -> int | None:
    """The dimension that tensor parallelism splits; None if it splits none."""
    if not is_mcore_tensor_model_parallel(param):
        return None
    explicit = getattr(param, "_tp_partition_dim", None)
    return explicit if explicit is not None else param.partition_dim  # type: ignore[attr-defined]
