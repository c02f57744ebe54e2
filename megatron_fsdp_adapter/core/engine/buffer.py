"""Flat storage and the fixed views into it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from megatron_fsdp_adapter.core.layout.format import Plane, plain
from megatron_fsdp_adapter.core.layout.group import ShardSpec
from megatron_fsdp_adapter.core.layout.ranges import FlatRange
from megatron_fsdp_adapter.core.runtime.device import Runtime, fill_with_nan, storage_bytes

from .saved_tensors import mark_owned

LARGE = 1 << 20
"""Elements from which a tensor is copied by a kernel of its own."""


def copies_to(outputs: Sequence[torch.Tensor]) -> Callable[[Sequence[torch.Tensor]], None]:
    """A function that copies each of as many inputs to its output, casting it. Which outputs are
    large is looked at once.

    Torch's kernel for many tensors casts 109M elements in 0.20 ms on an H200, and in 2.2 ms beside
    GEMMs, which leave room for few of its blocks; one tensor's own in 0.15 and 0.74 ms.
    """
    large = [(i, output) for i, output in enumerate(outputs) if output.numel() >= LARGE]
    small = [i for i, output in enumerate(outputs) if output.numel() < LARGE]
    small_outputs = [outputs[i] for i in small]

    def copy(inputs: Sequence[torch.Tensor]) -> None:
        for i, output in large:
            output.copy_(inputs[i])
        if small:
            torch._foreach_copy_(small_outputs, [inputs[i] for i in small])

    return copy


def copy_each(outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
    """Copies every input to its output, casting it. ValueError unless there are as many."""
    if len(outputs) != len(inputs):
        raise ValueError(f"{len(outputs)} outputs and {len(inputs)} inputs")
    copies_to(outputs)(inputs)


class FlatBuffer:
    """A 1-D tensor of fixed length whose storage may come and go.

    Views are made once, while the storage is there, and stay valid objects for life: they see
    whatever storage the buffer has at the moment. That is what lets a parameter keep one `.data`
    view and lets backward read what forward saved. Replacing the tensor at each use was
    rejected: `F.linear` saves a view, which would go on pointing at the old storage.

    Args:
        numel: elements. dtype, device: of the elements. runtime: takes and gives the storage.
        memory: uint8, of as many bytes, to lie in for good; storage then never goes.
        is_zero: whether that is zero already.

    label: what it is, and whose, for messages. in_slot: whether it lies in given memory. fixed:
    whether its storage stays for good.
    """

    label = "a buffer"

    def __init__(
        self, numel: int, dtype: torch.dtype, runtime: Runtime,
        memory: torch.Tensor | None = None, is_zero: bool = False,
    ) -> None:
        self.runtime, self.fixed = runtime, memory is not None
        self.in_slot = self.fixed
        self._in_use = True
        self._memory = memory  # pages are locked while this object lives; views do not hold it
        if memory is None:
            self.tensor = torch.zeros(numel, dtype=dtype, device=runtime.device)
        else:
            self.tensor = memory.view(dtype) if is_zero else memory.view(dtype).zero_()
        mark_owned(self.tensor)

    @property
    def allocated(self) -> bool:
        return storage_bytes(self.tensor) > 0

    @property
    def nbytes(self) -> int:
        """Bytes when allocated."""
        return self.tensor.numel() * self.tensor.element_size()

    def allocate(self) -> None:
        """Takes storage on the current stream; contents are undefined, NaN where the runtime
        poisons. Nothing where it is taken already."""
        if not self.fixed:
            try:
                self.runtime.allocate(self.tensor)
            except RuntimeError as error:
                self.runtime.on_out_of_memory(self.label, self.tensor, error)
                raise
        self._in_use = True

    def release(self) -> None:
        """Gives the storage back on the current stream. Where the runtime poisons, what stays in
        fixed memory is NaN from here on: a late read, or an addition, becomes NaN."""
        if not self.fixed:
            self.runtime.release(self.tensor)
        elif self._in_use:
            self.forget()
        self._in_use = False

    def forget(self) -> None:
        """Marks the contents as unused; the storage stays."""
        if self.runtime.poison and self.allocated:
            fill_with_nan(self.tensor)

    def views(self, ranges: Sequence[FlatRange]) -> list[torch.Tensor]:
        """A 1-D view of each range. The buffer must be allocated."""
        return [self.tensor[extent.start : extent.stop] for extent in ranges]


WHOLE = plain(torch.float32).planes[0]
"""Layout of a buffer that has one element for each of the group, whatever its dtype."""


class ShardedBuffer(FlatBuffer):
    """A flat buffer with the elements of one shard of a group, in one plane of its format.

    Args:
        stored: the shard that there is memory for. specs: shards inside it, `stored` among them,
            whose views are made now and stay for life.
        dtype: of the elements; None for the plane's. memory, is_zero: as of `FlatBuffer`.

    host: the same in host memory, where the values are that checkpoints, loads and exports see, if
    this one has storage only while an optimizer updates it. Hiding the copies in host memory was
    rejected: whatever reads a main weight between two steps would have to bring it back first.
    """

    def __init__(
        self, stored: ShardSpec, specs: Sequence[ShardSpec], runtime: Runtime,
        dtype: torch.dtype | None = None, plane: Plane = WHOLE,
        memory: torch.Tensor | None = None, is_zero: bool = False,
    ) -> None:  # fmt: skip
        numel = plane.numel(stored.layout.shard_numel)
        super().__init__(numel, dtype or plane.dtype, runtime, memory, is_zero)
        self.stored, self.plane = stored, plane
        self.host: ShardedBuffer | None = None
        self._segments = {spec: self._segment_views(spec) for spec in specs}
        self._items = {spec: self._item_views(spec) for spec in specs}

    def segments(self, spec: ShardSpec) -> list[torch.Tensor]:
        """The part of each segment that belongs to `spec`, 1-D."""
        return self._segments[spec]

    def items(self, spec: ShardSpec) -> list[torch.Tensor]:
        """The rows of each parameter that belong to `spec`; zero rows where it has none."""
        return self._items[spec]

    @functools.cached_property
    def params(self) -> list[torch.Tensor]:
        """A view of each parameter in the shape of the module's own, in a buffer that stores all of
        it."""
        shapes = [self.plane.shape(spec.shape) for spec in self.stored.layout.specs]
        items = self._items[self.stored]
        return [item.view(shape) for item, shape in zip(items, shapes, strict=True)]

    def load(self) -> None:
        """Brings the values of `host` to the device, on the current stream."""
        self.allocate()
        self.tensor.copy_(self.host.tensor, non_blocking=True)  # type: ignore[union-attr]

    def store(self) -> None:
        """Takes them back to host memory, on the current stream."""
        self.host.tensor.copy_(self.tensor, non_blocking=True)  # type: ignore[union-attr]

    def _segment_views(self, spec: ShardSpec) -> list[torch.Tensor]:
        places = zip(self.stored.segments, spec.segments, strict=True)
        parts = [part.shift(own.start - full.start) for (full, own), (part, _) in places]
        return self.views([self.plane.range(part) for part in parts])

    def _item_views(self, spec: ShardSpec) -> list[torch.Tensor]:
        shifts = [own.start - full.start for full, own in self.stored.segments]
        pieces = []
        for index, placement in enumerate(spec.layout.placements):
            rows = spec.range(index)
            shift = 0 if rows.empty else placement.offset + shifts[placement.segment]
            (piece,) = self.views([self.plane.range(rows.shift(shift))])
            pieces.append(piece.view(self.plane.shape(spec.shape(index))))
        return pieces
