"""One plane of a group's compute weights: its buffers, and what is gathered from where."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_fsdp_adapter.core.layout.format import Plane
from megatron_fsdp_adapter.core.layout.group import GroupLayout
from megatron_fsdp_adapter.core.runtime.comm import Pair

from .buffer import FlatBuffer, Held, copy_each, items_in, segments_in
from .buffer_pool import UnitBuffers


@dataclass(frozen=True)
class Parts:
    """Of a group's buffers everything, what this rank has after a reduction over the shard axis,
    and what its optimizer updates."""

    full: Held
    inner: Held
    held: Held

    @property
    def layout(self) -> GroupLayout:
        return self.full.layout


class WeightPlane:
    """The buffers of one plane, present, zero.

    Args:
        keeps: whether this rank's shard stays while the full buffer comes and goes.

    Attributes:
        full: the whole plane. shard: the buffer that has this rank's part of it for life, `full`
            itself unless one is kept beside it.
        items: of each parameter, in `full`; held, held_items: what this rank's optimizer updates of
            each segment, and of each parameter, in `shard`.
        gather_pairs, outer_pairs: output and input of the gather over each axis.
    """

    def __init__(self, plane: Plane, parts: Parts, staging: UnitBuffers, keeps: bool) -> None:
        self.plane, layout = plane, parts.layout
        self.full = self.shard = staging.weight(plane.numel(layout.total_numel), plane.dtype)
        shapes = [plane.shape(spec.shape) for spec in layout.specs]
        items = items_in(self.full, parts.full, parts.full, plane)
        self.items = [item.view(shape) for item, shape in zip(items, shapes, strict=True)]
        self._own = inner = segments_in(self.full, parts.full, parts.inner, plane)
        stored = parts.full
        if keeps:
            stored = parts.inner
            numel = plane.numel(stored.layout.shard_numel)
            self.shard = FlatBuffer(numel, plane.dtype, staging.runtime)
            inner = segments_in(self.shard, stored, parts.inner, plane)
        self.held = segments_in(self.shard, stored, parts.held, plane)
        self.held_items = items_in(self.shard, stored, parts.held, plane)
        full = segments_in(self.full, parts.full, parts.full, plane)
        self.gather_pairs: list[Pair] = list(zip(full, inner, strict=True))
        self.outer_pairs: list[Pair] = list(zip(inner, self.held, strict=True))

    def take_shard(self) -> None:
        """Copies this rank's part of what is in the full buffer to where it is kept."""
        if self.shard is not self.full:
            copy_each([own for _, own in self.gather_pairs], self._own)

    @property
    def buffers(self) -> list[torch.Tensor]:
        """Flat tensors, one a storage."""
        kept = [] if self.shard is self.full else [self.shard.tensor]
        return [self.full.tensor, *kept]
