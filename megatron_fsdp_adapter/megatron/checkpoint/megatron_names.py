"""Replacements for functions that Megatron's checkpoint code calls by name, for DTensors that know
their chunks.

Megatron's `fsdp_dtensor` path imports helpers from its bundled engine. Those find out where a
shard lies by asking all ranks, once per tensor and dimension, and hang when ranks hold different
tensors. These functions have the same names and signatures, take the answer from the layout, and
do not communicate, except those that make a whole tensor. `install()` puts them in the places of
the originals.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate

from megatron_fsdp_adapter.checkpoint.state import flatten
from megatron_fsdp_adapter.core.dtensor.chunks import lacks_chunks
from megatron_fsdp_adapter.core.dtensor.uneven import whole_tensor


def preprocess_state_dict_for_uneven_dtensor(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Checks that torch DCP can save and load every DTensor of a nested state; returns it.

    Nothing has to be prepared: DTensors that our wrapper and optimizer put into a state dict know
    their chunks. ValueError names every sharded DTensor that does not.
    """
    missing = [key for key, leaf in flatten(state_dict).items() if lacks_chunks(leaf)]
    if missing:
        raise ValueError(
            f"{len(missing)} sharded DTensors carry no chunks: {', '.join(missing)}. Take the "
            "state from state_dict_for_save_checkpoint() and the optimizer's sharded_state_dict()"
        )
    return state_dict


def make_fsdp_dtensor(*args: Any, **kwargs: Any) -> NoReturn:
    """Raises ValueError: the original knows only the shapes of the bundled engine.

    Core's own splits of fused weights call it. In the state dicts of the wrapper and the optimizer
    they find nothing to split."""
    raise ValueError(
        "make_fsdp_dtensor: Megatron's own split of a fused weight does not know these shards. "
        "Take the parts from state_dict_for_save_checkpoint() and the optimizer's "
        "sharded_state_dict(), or call uninstall() to use Megatron's engine"
    )


def uneven_dtensor_to_full_tensor(dtensor: DTensor) -> torch.Tensor:
    """The whole tensor on every rank of the mesh (`whole_tensor`). Collective. Core calls this from
    0.18 on.

    ValueError if the argument is no DTensor, or if it is sharded and its place in the whole is
    unknown.
    """
    if not isinstance(dtensor, DTensor):
        raise ValueError(f"{type(dtensor).__name__} is not a DTensor")
    return whole_tensor(dtensor)


def gather_uneven_dtensor_to_full_tensor(
    dtensor: DTensor, target_device: torch.device | None = None
) -> DTensor:
    """The whole tensor on every rank of the mesh, as a DTensor replicated over it. Collective.

    target_device: where the result goes (None: where `dtensor` is).
    Raises ValueError for a device of another type than the mesh's, and for a sharded DTensor
    whose place in the whole is unknown.
    """
    full = uneven_dtensor_to_full_tensor(dtensor)
    mesh = dtensor.device_mesh
    device_type = mesh.device_type
    if target_device is not None and torch.device(target_device).type != device_type:
        raise ValueError(
            f"target_device={target_device}: a DTensor is on the devices of its mesh, here "
            f"{device_type}. Move the result's to_local() instead"
        )
    full = full.to(target_device or full.device)
    return DTensor.from_local(full, mesh, [Replicate()] * mesh.ndim, run_check=False)


def redistribute_uneven_dtensor_to_replicated(dtensor: DTensor) -> DTensor:
    """Calls `gather_uneven_dtensor_to_full_tensor`, which has this name from 0.18 on.

    It is a separate function because `uninstall()` finds replacements by identity: one object
    cannot stand for two originals."""
    return gather_uneven_dtensor_to_full_tensor(dtensor)
