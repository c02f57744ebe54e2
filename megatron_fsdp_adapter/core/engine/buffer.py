"""Flat storage and the fixed views into it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_fsdp_adapter.core.layout.format import Plane, plain
from megatron_fsdp_adapter.core.layout.group import GroupLayout
from megatron_fsdp_adapter.core.layout.ranges import FlatRange
from megatron_fsdp_adapter.core.runtime.device import Runtime, fill_with_nan, storage_bytes

from .saved_tensors import mark_owned

LARGE = 1 << 20
"""Elements from which a tensor is copied by a kernel of its own."""


def copy_each(outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
    """Copies every input to its output, casting it.

    Torch's kernel for many tensors casts 109M elements in 0.20 ms on an H200, and in 2.2 ms beside
    matrix products, which leave room for few of its blocks; one tensor's own in 0.15 and 0.74 ms.
    """
    pairs = list(zip(outputs, inputs, strict=True))
    for output, source in pairs:
        if output.numel() >= LARGE:
            output.copy_(source)
    small = [pair for pair in pairs if pair[0].numel() < LARGE]
    if small:
        torch._foreach_copy_([output for output, _ in small], [source for _, source in small])


class Copies:
    """`copy_each` to `outputs` that stay what they are: which are large is looked at once."""

    def __init__(self, outputs: Sequence[torch.Tensor]) -> None:
        is_large = [output.numel() >= LARGE for output in outputs]
        self._large = [(i, output) for i, output in enumerate(outputs) if is_large[i]]
        self._small = [i for i, large in enumerate(is_large) if not large]
        self._small_outputs = [outputs[i] for i in self._small]

    def __call__(self, inputs: Sequence[torch.Tensor]) -> None:
        """Copies each of as many inputs to its output, casting it."""
        for i, output in self._large:
            output.copy_(inputs[i])
        if self._small:
            torch._foreach_copy_(self._small_outputs, [inputs[i] for i in self._small])


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

    label: what it is, and whose, for messages. in_slot: whether it lies in given memory.
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

    def keep(self) -> None:
        """Keeps the storage that is there for good: a CUDA graph writes to it."""
        self.fixed = True

    def views(self, ranges: Sequence[FlatRange]) -> list[torch.Tensor]:
        """A 1-D view of each range. The buffer must be allocated."""
        return [self.tensor[extent.start : extent.stop] for extent in ranges]


@dataclass(frozen=True)
class Held:
    """Which part of a group's full buffer is meant: shard number `rank` of `layout`, in every
    segment. A parameter called `stored` is what a buffer has memory for; `held` is the part of
    it that is wanted."""

    layout: GroupLayout
    rank: int


WHOLE = plain(torch.float32).planes[0]
"""Of a buffer that has one element for each of the group, whatever its dtype."""


def segments_in(
    buffer: FlatBuffer, stored: Held, held: Held, plane: Plane = WHOLE
) -> list[torch.Tensor]:
    """The part `held` of each segment, 1-D, in a buffer that has the part `stored` of the group's
    `plane`. `held` must lie inside `stored`."""
    places = zip(
        stored.layout.segment_shards(stored.rank),
        held.layout.segment_shards(held.rank),
        strict=True,
    )
    parts = [part.shift(own.start - full.start) for (full, own), (part, _) in places]
    return buffer.views([plane.range(part) for part in parts])


def items_in(
    buffer: FlatBuffer, stored: Held, held: Held, plane: Plane = WHOLE
) -> list[torch.Tensor]:
    """The rows of each item that belong to `held`, in a buffer that has the part `stored` of the
    group's `plane`; of zero rows where `held` has none."""
    layout = held.layout
    shifts = [own.start - full.start for full, own in stored.layout.segment_shards(stored.rank)]
    pieces = []
    for index, placement in enumerate(layout.placements):
        rows = layout.shard_range(index, held.rank)
        shift = 0 if rows.empty else placement.offset + shifts[placement.segment]
        (piece,) = buffer.views([plane.range(rows.shift(shift))])
        pieces.append(piece.view(plane.shape(layout.local_shape(index, held.rank))))
    return pieces
