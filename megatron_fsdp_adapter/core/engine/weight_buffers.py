"""Weights of one group: those that modules compute with, and those that the optimizer updates.

Main weights *are* this rank's slice of the compute weights, where these are kept and have the same
dtype. Scales of quantized weights are made when main weights have changed. So are their bytes,
where they are kept; optim_grads_params casts the bytes of trained ones at every gather.

Where the optimizer is offloaded, main weights are in host memory if their dtype differs from that
of unquantized compute weights (`ParamGroup._main_is_on_host`). optim_grads_params then keeps its
shard of compute weights. The optimizer's update writes that shard too, while main weights are on
the device (`ShardedBuffer.load`).

With an outer axis that splits shards again, main weights are a part of the shard.
optim_grads_params keeps its shard of compute weights, in any format, between steps.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import nn

from megatron_fsdp_adapter.core.comm.communicator import Pair
from megatron_fsdp_adapter.core.layout.format import Plane

from .buffer import GroupShards, ShardedBuffer, Slot, copies_to, copy_each
from .quantized import QuantizedWeights
from .rows_buffer import buffer_of_rows


class WeightBuffers:
    """The compute weights of one group.

    Construction moves the parameters' values there and makes each raw parameter's `.data`, or the
    fields of a quantized one, a view of them for life. Afterwards they are present.

    Args:
        params: unsharded parameters, in layout order.
        shards: of the group's layout.
        planes: of the group's format.
        slot: where unsharded weights are in fixed memory.
        is_kept: they stay while the unit does not compute.
        keeps_shards: a shard is kept beside them, if they do not stay.
        is_gathered: there is a gather over the shard axis.
        quantized: library of quantized weights, where the format is a quantized one.
        without_values: those of `params` that have no values; the first gather brings them.
        own_rows: of a group that one rank has: tensors that the weights are in, if they have its
            dtype.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        shards: GroupShards,
        planes: Sequence[Plane],
        slot: Slot,
        is_kept: bool,
        keeps_shards: bool,
        is_gathered: bool,
        quantized: QuantizedWeights | None,
        without_values: Collection[nn.Parameter] = (),
        own_rows: Sequence[torch.Tensor] | None = None,
    ) -> None:
        self.slot = slot  # fixed memory of unsharded weights, or none
        # Whether unsharded weights stay while the unit does not compute.
        self.is_kept = is_kept
        # Writes this rank's part of quantized planes that are not kept.
        self.write_planes: Callable[..., None] | None = None
        # For each plane of the format, the buffer that modules compute with.
        self.unsharded: list[ShardedBuffer] = []
        if own_rows is not None and own_rows[0].dtype == planes[0].dtype:
            self.unsharded.append(buffer_of_rows(shards, own_rows))
            planes = ()
        for plane in planes:
            memory = slot.take(plane.nbytes(shards.full.layout.total_numel))
            self.unsharded.append(shards.buffer(shards.full, plane=plane, memory=memory))
        # Likewise the one that has this rank's part: the same, unless a shard is kept beside it.
        self.sharded = self.unsharded
        if keeps_shards and not is_kept:
            self.sharded = [shards.buffer(shards.inner, plane=plane) for plane in planes]
        self._move(params, quantized, without_values)
        # Output and input of the gather over each axis, of all planes; empty where nothing is
        # sharded over it.
        self.gather_pairs: list[Pair] = []
        self.outer_pairs: list[Pair] = []  # likewise
        for full, shard in zip(self.unsharded, self.sharded, strict=True):
            inner = shard.segments(shards.inner)
            if self.keeps_shards:
                copy_each(inner, full.segments(shards.inner))
            if is_gathered:
                self.gather_pairs += zip(full.segments(shards.full), inner, strict=True)
            if shards.splits_outer:
                self.outer_pairs += zip(inner, shard.segments(shards.held), strict=True)
        # `held` of each segment of the weights that main weights are cast to.
        self.held_segments = [] if quantized else self.sharded[0].segments(shards.held)
        self._shards = shards  # of the group's layout

    def _move(
        self,
        params: Sequence[nn.Parameter],
        quantized: QuantizedWeights | None,
        without_values: Collection[nn.Parameter],
    ) -> None:
        for index, param in enumerate(params):
            views = {full.plane.name: full.params[index] for full in self.unsharded}
            if quantized is None:
                (view,) = views.values()
                if param not in without_values:
                    view.copy_(param.data)
                param.data = view
            else:
                quantized.move(param, views)

    @functools.cached_property
    def keeps_shards(self) -> bool:
        """True if this rank's part is kept beside unsharded weights, which come and go."""
        return self.sharded is not self.unsharded

    @functools.cached_property
    def keeps_own(self) -> bool:
        """True if this rank's part stays while the unit does not compute."""
        return self.is_kept or self.keeps_shards

    @property
    def nbytes(self) -> int:
        """Bytes of unsharded weights."""
        return sum(full.nbytes for full in self.unsharded)

    def parts_like(self, main: ShardedBuffer) -> list[torch.Tensor]:
        """The parts of the weights that the segments of `main` are cast to; none of quantized
        weights."""
        if not self.held_segments:
            return []
        return self.sharded[0].parts_like(main, self._shards.held)

    def cast_planes_by(self, write: Callable[..., None]) -> None:
        """Sets the function that each gather calls to write planes that are not kept."""
        self.write_planes = write

    def allocate(self) -> None:
        """Takes memory for unsharded weights, on the current stream."""
        for full in self.unsharded:
            full.allocate()

    def release(self) -> None:
        """Gives the memory of unsharded weights back, on the current stream."""
        for full in self.unsharded:
            full.release()

    def keep_memory(self, kept: bool) -> None:
        """Keeps the memory of unsharded weights from now on, or no longer, on the current
        stream."""
        for full in self.unsharded:
            if kept:
                full.keep_storage()
            else:
                full.let_storage_go()


class MainWeights:
    """The main weights of one group. Construction gives them their first values.

    Args:
        device_buffer: the one that the optimizer updates: that of `weights`, one of its own, or one
            whose values are in host memory.
        weights: the compute weights, which are present.
        shards: of the group's layout.
        params: unsharded parameters, in layout order.
        values: by parameter, the first main weights; a parameter without begins with its weights.
        rows: likewise this rank's rows of them.
    """

    def __init__(
        self,
        device_buffer: ShardedBuffer,
        weights: WeightBuffers,
        shards: GroupShards,
        params: Sequence[nn.Parameter],
        values: Mapping[nn.Parameter, torch.Tensor],
        rows: Mapping[nn.Parameter, torch.Tensor],
    ) -> None:
        self.device_buffer = device_buffer  # the one that the optimizer updates
        # The one that has the values between steps, in host memory or not.
        self.buffer = device_buffer.host or device_buffer
        self.dtype = device_buffer.dtype  # of the elements
        # Whether compute weights equal the main weights in host memory.
        self.is_cast = not rows
        self._weights = weights  # that they are cast to
        self._shards = shards  # of the group's layout
        self._segments = self.buffer.segments(shards.held)  # what is cast
        self._targets = weights.parts_like(self.buffer)  # what that is cast to
        self._cast = copies_to(self._targets)  # casts it
        # Whether it is in host memory, and that on the device.
        self._is_elsewhere = bool(self._targets) and (
            self._targets[0].device.type != self._segments[0].device.type
        )
        has_values = self.is_compute_weight or not self.buffer.has_padding
        if self._targets and not has_values:
            copy_each(self._segments, self._targets)
        for index, param in enumerate(params):
            own = self.buffer.items(shards.held)[index]
            if param in rows:
                if own is not rows[param]:
                    own.copy_(rows[param])
            elif param in values:
                part = shards.held.range(index)
                given = values[param].reshape(-1)[part.start : part.stop]
                own.copy_(given.view(own.shape))

    def rows(self, index: int) -> torch.Tensor:
        """This rank's rows of the parameter at `index`, on the device."""
        return self.device_buffer.items(self._shards.held)[index]

    @functools.cached_property
    def is_compute_weight(self) -> bool:
        """True if they are a slice of the kept compute weights."""
        return self.device_buffer is self._weights.unsharded[0]

    @functools.cached_property
    def is_on_host(self) -> bool:
        """True if they are in host memory."""
        return self.buffer is not self.device_buffer

    def changed(self) -> None:
        """Notes that they may have been written: the next gather casts them."""
        self.is_cast = False

    def write_weights(self) -> None:
        """Casts them into this rank's part of the compute weights.

        Quantized weights are written by `write_planes`, if they are not kept. Main weights in host
        memory are cast only if they have changed."""
        weights = self._weights
        if weights.write_planes is not None:
            weights.write_planes()
        if self.is_compute_weight or not self._targets:
            return
        if not (self.is_on_host and self.is_cast):
            segments = self._segments
            if self._is_elsewhere:  # a copy that casts too would cast on the host, and wait
                device = self._targets[0].device
                segments = [one.to(device, non_blocking=True) for one in segments]
            self._cast(segments)
        self.is_cast = True

    def write_weights_from_device(self) -> None:
        """Casts main weights that are in host memory, from the device buffer in which an optimizer
        has just updated them."""
        if self.is_on_host:
            copy_each(self._targets, self.device_buffer.segments(self._shards.held))
            self.is_cast = True
