"""Where a rank's piece of a tensor lies in the whole tensor, told to torch DCP without talking.

torch works out the place of a DTensor's shard from mesh and placement, which is only right for an
even split. Ours are uneven (a shard boundary falls wherever a flat buffer is cut), so each DTensor
carries its *chunks*: blocks (offsets, sizes) of the whole tensor, in the order in which they lie
in the local tensor. They are a pure function of the layout; nothing is exchanged. torch DCP asks
a DTensor's local tensor for `__create_chunk_list__` and `__create_write_items__` before it falls
back to its own arithmetic, so that is where they are hung.

The attributes belong to one tensor *object*: `detach()`, `clone()` and arithmetic make a DTensor
whose local tensor has none. Whoever hands such a value to a checkpoint carries them over with
`copy_chunks`.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from megatron_fsdp_adapter.layout.group import GroupLayout
from megatron_fsdp_adapter.layout.ranges import Box

from . import reshard

_CHUNK_LIST, _WRITE_ITEMS = "__create_chunk_list__", "__create_write_items__"
_TENSOR_SHARD = "__get_tensor_shard__"


@dataclass(frozen=True)
class LayoutRef:
    """Which piece of which group layout an optimizer parameter is.

    layout: the group's layout; index: the parameter's number in it; rank: the shard number of
    this process; tp_offset: where this process's tensor-parallel slice begins in the whole
    tensor, one number per dimension (None: at the origin).
    Raises ValueError if the layout has no such parameter or shard.
    """

    layout: GroupLayout
    index: int
    rank: int
    tp_offset: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.index < len(self.layout.specs):
            raise ValueError(
                f"parameter {self.index} is not in a layout of {len(self.layout.specs)} parameters"
            )
        if not 0 <= self.rank < self.layout.num_shards:
            raise ValueError(f"shard {self.rank} is not one of {self.layout.num_shards} shards")
        if self.tp_offset is not None and len(self.tp_offset) != len(self.shape):
            raise ValueError(f"tp_offset={self.tp_offset} does not fit the shape {self.shape}")

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor-parallel slice; (1,) for a 0-D parameter."""
        return self.layout.specs[self.index].layout_shape

    def chunks(self) -> tuple[Box, ...]:
        """The blocks of the whole tensor that this process holds; empty if it holds nothing."""
        return reshard.chunks(self.layout, self.index, self.rank, self.tp_offset)


def attach_chunks(dtensor: DTensor, chunks: Sequence[Box]) -> None:
    """Makes torch DCP save and load `dtensor` as these blocks of the whole tensor.

    chunks: (offsets, sizes) in coordinates of the whole tensor, in the order of the elements of
    the local tensor; none if the local tensor is empty. Raises ValueError if a block is not
    inside the tensor's shape, or if together they do not have the local tensor's size.
    """
    local = dtensor._local_tensor
    _check_chunks(tuple(dtensor.shape), local, chunks)
    metadata = [ChunkStorageMetadata(torch.Size(o), torch.Size(s)) for o, s in chunks]

    def create_chunk_list() -> list[ChunkStorageMetadata]:
        return list(metadata)

    def create_write_items(fqn: str, tensor: DTensor) -> list[WriteItem]:
        return [_write_item(fqn, tensor._local_tensor, tensor.size(), c) for c in metadata]

    setattr(local, _CHUNK_LIST, create_chunk_list)
    setattr(local, _WRITE_ITEMS, create_write_items)
    if [tuple(chunk.sizes) for chunk in metadata] not in ([], [tuple(local.shape)]):
        setattr(local, _TENSOR_SHARD, _shard_getter(local, metadata))


def has_chunks(dtensor: DTensor) -> bool:
    """True if `attach_chunks` was called on this very object (not on one it was derived from)."""
    return hasattr(dtensor._local_tensor, _CHUNK_LIST)


def is_replicated(dtensor: DTensor) -> bool:
    """True if every rank holds the whole tensor, so that its place in it needs no telling."""
    return all(placement.is_replicate() for placement in dtensor.placements)


def read_chunks(dtensor: DTensor) -> tuple[Box, ...]:
    """The chunks as given to `attach_chunks`. Raises ValueError if there are none."""
    if not has_chunks(dtensor):
        raise ValueError(
            f"a DTensor of shape {tuple(dtensor.shape)} carries no chunks; give it some with "
            "attach_chunks, or copy_chunks from the parameter it was derived from"
        )
    listed = dtensor._local_tensor.__create_chunk_list__()  # type: ignore[attr-defined]
    return tuple((tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in listed)


def copy_chunks(src: DTensor, dst: DTensor) -> None:
    """Gives `dst`, derived from `src` (detach, zeros_like, ...), the chunks of `src`.

    Raises ValueError if `src` has none or if the two differ in global or local shape.
    """
    if dst.shape != src.shape or dst._local_tensor.shape != src._local_tensor.shape:
        raise ValueError(
            f"chunks of a tensor of shape {tuple(src.shape)} (here "
            f"{tuple(src._local_tensor.shape)}) do not fit one of shape {tuple(dst.shape)} (here "
            f"{tuple(dst._local_tensor.shape)})"
        )
    attach_chunks(dst, read_chunks(src))


def uneven_dtensor(
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: Sequence[int],
    stride: Sequence[int],
    chunks: Sequence[Box],
) -> DTensor:
    """A DTensor of global `shape` and `stride` over this rank's `local`, with chunks attached.

    The DTensor uses the storage of `local`: what is loaded into it is seen there. No collective.
    A 0-D tensor cannot be sharded and torch takes `shape=()` for "not given", so it becomes (1,).
    Raises ValueError as `attach_chunks` does.
    """
    if not shape:
        local, shape, stride = local.reshape(-1), (1,), (1,)
    dtensor = DTensor.from_local(
        local.detach(),
        mesh,
        list(placements),
        run_check=False,
        shape=torch.Size(shape),
        stride=tuple(stride),
    )
    attach_chunks(dtensor, chunks)
    return dtensor


def dtensor_like(source: DTensor, local: torch.Tensor) -> DTensor:
    """A DTensor over `local` with the geometry and chunks of `source`, dtype that of `local`.

    For optimizer state and gradients. Raises ValueError if `local` has another shape than the
    local tensor of `source`, or if `source` has no chunks.
    """
    if local.shape != source._local_tensor.shape:
        raise ValueError(
            f"local shape {tuple(local.shape)} is not that of the source, "
            f"{tuple(source._local_tensor.shape)}"
        )
    return uneven_dtensor(
        local,
        source.device_mesh,
        source.placements,
        source.shape,
        source.stride(),
        read_chunks(source),
    )


def stored_alike(source: DTensor, local: torch.Tensor) -> torch.Tensor:
    """`local`, made into a plain tensor that torch DCP saves as it would save `source`.

    local: any device, shape of the local tensor of `source`; its storage is used. For copies on
    another device than the mesh's, where no DTensor can be. It can only be saved, not loaded into.
    Raises ValueError if `source` is sharded and has no chunks.
    """
    shape = tuple(source.shape)
    whole: tuple[Box, ...] = (((0,) * len(shape), shape),)
    chunks = whole if is_replicated(source) and not has_chunks(source) else read_chunks(source)
    _check_chunks(shape, local, chunks)
    metadata = [ChunkStorageMetadata(torch.Size(o), torch.Size(s)) for o, s in chunks]

    def create_write_items(fqn: str, tensor: torch.Tensor) -> list[WriteItem]:
        return [_write_item(fqn, tensor, torch.Size(shape), chunk) for chunk in metadata]

    setattr(local, _WRITE_ITEMS, create_write_items)
    setattr(local, _TENSOR_SHARD, _shard_getter(local, metadata))
    return local


def _check_chunks(shape: tuple[int, ...], local: torch.Tensor, chunks: Sequence[Box]) -> None:
    for offsets, sizes in chunks:
        fits = len(offsets) == len(sizes) == len(shape) and all(
            o >= 0 and n > 0 and o + n <= whole
            for o, n, whole in zip(offsets, sizes, shape, strict=True)
        )
        if not fits:
            raise ValueError(f"chunk at {offsets} of size {sizes} is not inside a {shape} tensor")
    numel = sum(math.prod(sizes) for _, sizes in chunks)
    if numel != local.numel():
        raise ValueError(
            f"chunks {tuple(chunks)} have {numel} elements, the local tensor of shape "
            f"{tuple(local.shape)} has {local.numel()}"
        )


def _write_item(
    fqn: str, local: torch.Tensor, size: torch.Size, chunk: ChunkStorageMetadata
) -> WriteItem:
    return WriteItem(
        index=MetadataIndex(fqn, chunk.offsets),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=chunk,
            properties=TensorProperties.create_from_tensor(local),
            size=size,
        ),
    )


def _shard_getter(
    local: torch.Tensor, chunks: list[ChunkStorageMetadata]
) -> Callable[[MetadataIndex], torch.Tensor]:
    """The function by which torch DCP finds a chunk that is not simply the local tensor.

    The reference is weak because the function hangs on the very tensor that it returns; a deep
    copy of that tensor would share the function, so it must not be loaded into.
    """
    local_ref = weakref.ref(local)

    def get_tensor_shard(index: MetadataIndex) -> torch.Tensor:
        held = local_ref()
        if held is None:
            raise RuntimeError(f"{index.fqn}: its local tensor no longer exists; copy_chunks anew")
        start = 0
        for chunk in chunks:
            numel = math.prod(chunk.sizes)
            if chunk.offsets == index.offset:
                # view, not reshape, which may copy: a load writes through it
                return held.view(-1)[start : start + numel].view(chunk.sizes)
            start += numel
        raise ValueError(f"{index.fqn}: no chunk at {index.offset} on this rank")

    return get_tensor_shard
