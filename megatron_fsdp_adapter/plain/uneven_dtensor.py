"""The helpers of `megatron_fsdp.uneven_dtensor`: DTensors here know their rows already.

Each raises ValueError for a DTensor that is cut otherwise than torch would and does not know where.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._pytree import tree_leaves

from ..core.dtensor.blocks import Chunks
from ..core.dtensor.uneven import UnevenDTensor, known_chunks, whole_tensor


def _chunks(dtensor: DTensor) -> Chunks:
    """This rank's rows: one block, or none. ValueError for several, or if its place is unknown."""
    chunks = known_chunks(dtensor)
    if len(chunks.boxes) > 1:
        raise ValueError(
            f"dtensor={tuple(dtensor.shape)}, {dtensor.placements}: its rows on this rank are more "
            "than one block. Pass a DTensor of a sharded model's state dict"
        )
    return chunks


def gather_and_compute_chunk_metadata(dtensor: DTensor) -> ChunkStorageMetadata:
    """Offsets and sizes of this rank's part. Not collective."""
    listed = _chunks(dtensor).listed()
    if listed:
        return listed[0]
    none = torch.Size([0] * dtensor.dim())
    return ChunkStorageMetadata(none, none)


def preprocess_state_dict_for_uneven_dtensor(state_dict: dict[str, Any]) -> dict[str, Any]:
    """`state_dict` itself: torch DCP can save and load its DTensors as they are. Checks that."""
    for value in tree_leaves(state_dict):
        if isinstance(value, DTensor):
            _chunks(value)
    return state_dict


uneven_dtensor_to_full_tensor = whole_tensor


def redistribute_uneven_dtensor_to_replicated(dtensor: DTensor) -> DTensor:
    """`dtensor` as a replicated DTensor: every rank has the whole. Collective."""
    mesh = dtensor.device_mesh
    placements = [Replicate()] * mesh.ndim
    return DTensor.from_local(whole_tensor(dtensor), mesh, placements, run_check=False)


gather_uneven_dtensor_to_full_tensor = redistribute_uneven_dtensor_to_replicated


def split_dtensor(
    dtensor: DTensor,
    split_size_or_sections: int | Sequence[int],
    dim: int = 0,
    update_uneven_dtensor_chunk_meta: bool = False,
) -> Iterator[DTensor]:
    """The parts of `dtensor` along `dim`, as `torch.split` cuts the whole. They are views; not
    collective. `update_uneven_dtensor_chunk_meta` has no effect: all parts know their rows."""
    sections = split_size_or_sections
    if isinstance(sections, int):
        whole = dtensor.shape[dim]
        sections = [min(sections, whole - start) for start in range(0, whole, sections)]
    chunk = gather_and_compute_chunk_metadata(dtensor)
    own_first = chunk.offsets[dim]
    own_end = own_first + chunk.sizes[dim]
    first = 0  # of the part, in the whole
    for section in sections:
        start = max(first, own_first)
        size = max(0, min(first + section, own_end) - start)
        local_start = start - own_first if size else 0
        local = dtensor._local_tensor.detach().narrow(dim, local_start, size)
        offsets = list(chunk.offsets)
        offsets[dim] = start - first
        shape = list(dtensor.shape)
        shape[dim] = section
        stride = torch.empty(shape, device="meta").stride()
        boxes = ((tuple(offsets), tuple(local.shape)),) if local.numel() else ()
        placements = dtensor._spec.placements
        yield UnevenDTensor.over(
            local, dtensor.device_mesh, placements, shape, stride, Chunks(boxes)
        )
        first += section
