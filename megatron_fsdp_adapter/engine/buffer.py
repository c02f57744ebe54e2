"""Flat storage and the fixed views into it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_fsdp_adapter.layout.group import GroupLayout
from megatron_fsdp_adapter.layout.ranges import FlatRange
from megatron_fsdp_adapter.runtime.device import Runtime, storage_bytes


class FlatBuffer:
    """A 1-D tensor of fixed length whose storage may come and go.

    Views are made once, while the storage is there, and stay valid objects for life: they see
    whatever storage the buffer has at the moment. That is what lets a parameter keep one `.data`
    view and lets backward read what forward saved. Replacing the tensor at each use was
    rejected: `F.linear` saves a view, which would go on pointing at the old storage.

    Args:
        numel: elements. dtype, device: of the elements. runtime: takes and gives the storage.
    """

    def __init__(self, numel: int, dtype: torch.dtype, runtime: Runtime) -> None:
        self.runtime = runtime
        self.tensor = torch.zeros(numel, dtype=dtype, device=runtime.device)

    @property
    def allocated(self) -> bool:
        return storage_bytes(self.tensor) > 0

    @property
    def nbytes(self) -> int:
        """Bytes when allocated."""
        return self.tensor.numel() * self.tensor.element_size()

    def allocate(self) -> None:
        """Takes storage on the current stream; contents are undefined."""
        self.runtime.allocate(self.tensor)

    def release(self) -> None:
        """Gives the storage back on the current stream."""
        self.runtime.release(self.tensor)

    def views(self, ranges: Sequence[FlatRange]) -> list[torch.Tensor]:
        """A 1-D view of each range. The buffer must be allocated."""
        return [self.tensor[extent.start : extent.stop] for extent in ranges]


def full_items(buffer: FlatBuffer, layout: GroupLayout) -> list[torch.Tensor]:
    """The whole of each item, in its own shape, in a buffer of `layout.total_numel` elements."""
    ranges = [layout.item_range(index) for index in range(len(layout.specs))]
    return [
        view.view(spec.shape)
        for view, spec in zip(buffer.views(ranges), layout.specs, strict=True)
    ]


def own_ranges(layout: GroupLayout, rank: int) -> list[FlatRange]:
    """The rank's shard of each segment, in the full buffer."""
    return [full for full, _ in layout.segment_shards(rank)]


def shard_ranges(layout: GroupLayout, rank: int) -> list[FlatRange]:
    """The rank's shard of each segment, in its flat shard buffer."""
    return [shard for _, shard in layout.segment_shards(rank)]


def local_items_in_full(buffer: FlatBuffer, layout: GroupLayout, rank: int) -> list[torch.Tensor]:
    """The rank's rows of each item, in a full buffer."""
    pieces = []
    for index in range(len(layout.specs)):
        held = layout.shard_range(index, rank).shift(layout.item_range(index).start)
        pieces.append(buffer.tensor[held.start : held.stop].view(layout.local_shape(index, rank)))
    return pieces


def local_items_in_shard(buffer: FlatBuffer, layout: GroupLayout, rank: int) -> list[torch.Tensor]:
    """The rank's rows of each item, in its flat shard buffer."""
    pieces = []
    for index in range(len(layout.specs)):
        held = layout.shard_item_range(index, rank)
        pieces.append(buffer.tensor[held.start : held.stop].view(layout.local_shape(index, rank)))
    return pieces
