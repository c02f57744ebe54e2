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

from ..core.dtensor.uneven import Chunks, UnevenDTensor, known_chunks, whole_tensor


def _chunks(dtensor: DTensor) -> Chunks:
    """The block that this rank has, if any; ValueError if it has several, or its place is unknown.
    """
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
    none = torch.Size([0] * dtensor.dim())
    return listed[0] if listed else ChunkStorageMetadata(none, none)


def preprocess_state_dict_for_uneven_dtensor(state_dict: dict[str, Any]) -> dict[str, Any]:
    """`state_dict`, whose DTensors torch DCP can save and load as they are."""
    for value in tree_leaves(state_dict):
        if isinstance(value, DTensor):
            _chunks(value)
    return state_dict


uneven_dtensor_to_full_tensor = whole_tensor


def redistribute_uneven_dtensor_to_replicated(dtensor: DTensor) -> DTensor:
    """A DTensor of which every rank has the whole. Collective."""
    mesh = dtensor.device_mesh
    placements = [Replicate()] * mesh.ndim
    return DTensor.from_local(whole_tensor(dtensor), mesh, placements, run_check=False)


gather_uneven_dtensor_to_full_tensor = redistribute_uneven_dtensor_to_replicated


def split_dtensor(
    dtensor: DTensor, split_size_or_sections: int | Sequence[int], dim: int = 0,
    update_uneven_dtensor_chunk_meta: bool = False,
) -> Iterator[DTensor]:  # fmt: skip
    """The parts of `dtensor` along `dim`, as `torch.split` cuts the whole; views, and not
    collective. All know their rows, with either `update_uneven_dtensor_chunk_meta`."""
    whole, sections = dtensor.shape[dim], split_size_or_sections
    if isinstance(sections, int):
        sections = [min(sections, whole - start) for start in range(0, whole, sections)]
    chunk, first = gather_and_compute_chunk_metadata(dtensor), 0
    for section in sections:
        start = max(first, chunk.offsets[dim])
        size = max(0, min(first + section, chunk.offsets[dim] + chunk.sizes[dim]) - start)
        offsets, sizes, shape = list(chunk.offsets), list(chunk.sizes), list(dtensor.shape)
        local = dtensor._local_tensor.detach()
        local = local.narrow(dim, start - chunk.offsets[dim] if size else 0, size)
        offsets[dim], sizes[dim], shape[dim] = start - first, size, section
        boxes = ((tuple(offsets), tuple(sizes)),) if local.numel() else ()
        yield UnevenDTensor.over(
            local, dtensor.device_mesh, dtensor._spec.placements, shape,
            torch.empty(shape, device="meta").stride(), Chunks(boxes),
        )  # fmt: skip
        first += section
