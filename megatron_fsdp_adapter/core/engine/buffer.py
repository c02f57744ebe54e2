"""Flat storage and the fixed views into it: allocated and freed, or in fixed slots.

By default every buffer takes storage from the caching allocator and gives it back. A *slot* is
memory for life that several units use in turn (`fsdp_double_buffer`), so that it can be registered
with NCCL once (`nccl_ub`), and addresses do not change. The rules:

    which   a unit's slot is fixed. Units of a kind of which there are three or more (layers) take
            two slots in turn, sized by the largest of them all; those inside other units (parts
            of a layer) take two of their own. Every other unit has a slot of its own, but for two
            of them that run first and last (embedding, output layer), which share one.
    owner   a slot belongs to the unit that was gathered into it last. Another unit that is gathered
            ahead takes it over if the owner has been resharded. A unit whose module is called
            takes it over unless the owner computes; an owner that was kept for its backward, or
            gathered ahead, is gathered again then. Two units that compute at once, one inside the
            other, cannot share a slot: an error.
"""

from __future__ import annotations

import copyreg
import functools
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch

from megatron_fsdp_adapter.core.kernels.sums import copy_large
from megatron_fsdp_adapter.core.layout.format import Plane, plain
from megatron_fsdp_adapter.core.layout.group import GroupLayout, ShardSpec
from megatron_fsdp_adapter.core.layout.ranges import FlatRange
from megatron_fsdp_adapter.core.runtime.device import Runtime, fill_with_nan, storage_bytes

LARGE = 1 << 20
"""Elements from which a tensor is copied by a kernel of its own."""

_MARK = "_fsdp_engine_buffer"
"""Attribute of an engine's storages. A table of them was rejected: code that offloads inside of
units (Megatron's) would have to find the engine. So was a subclass of `Parameter`: most of what is
saved for backward are views, which have torch's class."""


def mark_owned(tensor: torch.Tensor) -> None:
    """Marks the storage of `tensor` as an engine's, for as long as it lives."""
    setattr(tensor.untyped_storage(), _MARK, True)


def is_owned(tensor: torch.Tensor) -> bool:
    """True if `tensor` is in a buffer of an engine. A tensor may be made of others, which are its
    attributes: then if any of them is."""
    if torch._C._has_storage(tensor) and getattr(tensor.untyped_storage(), _MARK, False):
        return True
    if type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return False
    names = copyreg._slotnames(type(tensor))  # type: ignore[attr-defined]
    attributes = [*vars(tensor).values(), *(getattr(tensor, name, None) for name in names)]
    return any(is_owned(value) for value in attributes if isinstance(value, torch.Tensor))


def copies_to(outputs: Sequence[torch.Tensor]) -> Callable[[Sequence[torch.Tensor]], None]:
    """A function that copies and casts inputs to `outputs`, one each.

    The sizes of outputs are looked at once, here, and not in each copy. Torch's kernel for many
    tensors is slow beside GEMMs, which leave room for few of its blocks
    (docs/contributing/results_experiments.md).
    """
    large = [(i, output) for i, output in enumerate(outputs) if output.numel() >= LARGE]
    small = [i for i, output in enumerate(outputs) if output.numel() < LARGE]
    small_outputs = [outputs[i] for i in small]

    def copy(inputs: Sequence[torch.Tensor]) -> None:
        for i, output in large:
            copy_large(output, inputs[i])
        if small:
            torch._foreach_copy_(small_outputs, [inputs[i] for i in small])

    return copy


def copy_each(outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
    """Copies and casts each input to its output. Raises ValueError unless there are as many."""
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
        numel: number of elements; dtype: of each.
        runtime: takes and gives the storage, on its device.
        memory: uint8, of as many bytes as the elements have. The buffer lies in it for good; its
            storage then never goes.
        is_zero: whether `memory` is zero already.
    """

    label = "a buffer"
    """Its name in messages: what is in it, and whose."""

    has_padding = True
    """True if elements of no parameter may lie between rows."""

    def __init__(
        self,
        numel: int,
        dtype: torch.dtype,
        runtime: Runtime,
        memory: torch.Tensor | None = None,
        is_zero: bool = False,
    ) -> None:
        self.runtime = runtime  # takes and gives the storage
        self.in_slot = memory is not None  # whether it lies in given memory
        self.fixed = self.in_slot  # whether its storage stays (`keep_storage`)
        # Whether the contents count, since it was last released.
        self._in_use = True
        # Pages are locked while this object lives; views do not hold it.
        self._memory = memory
        # All elements; 1-D.
        if memory is None:
            self.tensor = torch.zeros(numel, dtype=dtype, device=runtime.device)
        else:
            self.tensor = memory.view(dtype)
            if not is_zero:
                self.tensor.zero_()
        mark_owned(self.tensor)

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def storages(self) -> list[torch.Tensor]:
        """A tensor over each of its storages."""
        return [self.tensor]

    @property
    def allocated(self) -> bool:
        return storage_bytes(self.tensor) > 0

    @property
    def nbytes(self) -> int:
        """Bytes when allocated."""
        return self.tensor.numel() * self.tensor.element_size()

    def allocate(self) -> None:
        """Takes storage on the current stream, if it has none. Contents are undefined then, or NaN
        where the runtime poisons."""
        if not self.fixed:
            try:
                self.runtime.allocate(self.tensor)
            except RuntimeError as error:
                self.runtime.on_out_of_memory(self.label, self.tensor, error)
                raise
        self._in_use = True

    def release(self) -> None:
        """Gives the storage back on the current stream. Fixed memory stays; where the runtime
        poisons it becomes NaN, so that a late read, or an addition, becomes NaN."""
        if not self.fixed:
            self.runtime.release(self.tensor)
        elif self._in_use:
            self.forget()
        self._in_use = False

    def keep_storage(self) -> None:
        """From now on the storage stays: something else reads and writes its address."""
        if not self.allocated:
            self.allocate()
        self.fixed = True

    def let_storage_go(self) -> None:
        """Ends `keep_storage`, on the current stream."""
        self.fixed = self.in_slot
        if not self._in_use:
            self.release()

    def forget(self) -> None:
        """Declares the contents undefined: fills them with NaN where the runtime poisons, and else
        does nothing."""
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
        stored: the shard that there is memory for.
        specs: shards inside it, `stored` among them. Their views are made now and stay for life.
        dtype: of the elements; None for the plane's.
        memory, is_zero: as of `FlatBuffer`.
    """

    def __init__(
        self,
        stored: ShardSpec,
        specs: Sequence[ShardSpec],
        runtime: Runtime,
        dtype: torch.dtype | None = None,
        plane: Plane = WHOLE,
        memory: torch.Tensor | None = None,
        is_zero: bool = False,
    ) -> None:
        numel = plane.numel(stored.layout.shard_numel)
        super().__init__(numel, dtype or plane.dtype, runtime, memory, is_zero)
        # The shard that there is memory for.
        self.stored = stored
        # The plane of the format whose elements these are.
        self.plane = plane
        # The same elements in host memory, if this buffer has storage only while an optimizer
        # updates it. Checkpoints, loads and exports see the values there. Hiding the copies in host
        # memory was rejected: whatever reads a main weight between two steps would have to bring it
        # back first.
        self.host: ShardedBuffer | None = None
        # By shard, views of its part of each segment.
        self._segments = {spec: self._segment_views(spec) for spec in specs}
        # By shard, views of its rows of each parameter.
        self._items = {spec: self._item_views(spec) for spec in specs}

    def segments(self, spec: ShardSpec) -> list[torch.Tensor]:
        """The part of each segment that belongs to `spec`, 1-D."""
        return self._segments[spec]

    def items(self, spec: ShardSpec) -> list[torch.Tensor]:
        """The rows of each parameter that belong to `spec`; zero rows where it has none."""
        return self._items[spec]

    def parts_like(self, other: ShardedBuffer, spec: ShardSpec) -> list[torch.Tensor]:
        """Parts of this buffer that have the sizes of those that `other` has as segments."""
        if other.has_padding:
            return self._segments[spec]
        return [item.view(-1) for item in self._items[spec]]

    @functools.cached_property
    def params(self) -> list[torch.Tensor]:
        """A view of each parameter in its shape, or in that of its plane. `stored` must be all of
        the group."""
        both = zip(self._items[self.stored], self.stored.layout.specs, strict=True)
        return [item.view(self.plane.shape(spec.shape)) for item, spec in both]

    def load(self) -> None:
        """Brings the values of `host` to the device, on the current stream."""
        self.allocate()
        self.tensor.copy_(self.host.tensor, non_blocking=True)  # type: ignore[union-attr]

    def store(self) -> None:
        """Copies the values from the device to `host`, on the current stream."""
        self.host.tensor.copy_(self.tensor, non_blocking=True)  # type: ignore[union-attr]

    def _segment_views(self, spec: ShardSpec) -> list[torch.Tensor]:
        ranges = []
        for shift, (part, _) in zip(self._shifts(), spec.segments, strict=True):
            ranges.append(self.plane.range(part.shift(shift)))
        return self.views(ranges)

    def _item_views(self, spec: ShardSpec) -> list[torch.Tensor]:
        shifts = self._shifts()
        pieces = []
        for index, placement in enumerate(spec.layout.placements):
            rows = spec.range(index)
            shift = 0 if rows.empty else placement.offset + shifts[placement.segment]
            (piece,) = self.views([self.plane.range(rows.shift(shift))])
            pieces.append(piece.view(self.plane.shape(spec.shape(index))))
        return pieces

    def _shifts(self) -> list[int]:
        """For each segment, the number that is added to an offset in the group to get the one in
        this buffer."""
        return [own.start - full.start for full, own in self.stored.segments]


@dataclass(frozen=True)
class GroupShards:
    """The shards of one group's layout, each inside of the one before it, and the group's buffers
    over them. All views of a buffer are looked up by these shards (`ShardedBuffer.segments`,
    `items`)."""

    runtime: Runtime
    """Takes and gives the storage of buffers."""
    full: ShardSpec
    """All of the group."""
    inner: ShardSpec
    """The shard of this rank on the shard axis."""
    held: ShardSpec
    """The part of `inner` that this rank's optimizer updates."""

    @functools.cached_property
    def splits_axis(self) -> bool:
        """True if main weights are sharded over the shard axis."""
        return self.inner is not self.full

    @functools.cached_property
    def splits_outer(self) -> bool:
        """True if those shards are split again over the outer axis."""
        return self.held is not self.inner

    def buffer(
        self,
        stored: ShardSpec,
        dtype: torch.dtype | None = None,
        plane: Plane = WHOLE,
        memory: torch.Tensor | None = None,
    ) -> ShardedBuffer:
        """A buffer with the elements of `stored`. dtype, plane, memory: as of `ShardedBuffer`."""
        every = (self.full, self.inner, self.held)
        inside = every[every.index(stored) :]
        return ShardedBuffer(stored, inside, self.runtime, dtype, plane, memory)

    def offloaded(self, dtype: torch.dtype) -> ShardedBuffer:
        """A released buffer of `held`, whose values are zero and in host memory (`host`)."""
        made = self.buffer(self.held, dtype)
        made.host = self.in_host_memory(dtype)
        made.release()
        return made

    def in_host_memory(self, dtype: torch.dtype) -> ShardedBuffer:
        """A buffer with the elements of `held`, which are zero, in host memory."""
        held = self.held
        memory = self.runtime.host_memory(held.layout.shard_numel * dtype.itemsize)
        return ShardedBuffer(held, [held], self.runtime, dtype, memory=memory, is_zero=True)


ALIGNMENT = 512
"""Bytes; of each flat buffer in a slot."""

REPEATED = 3
"""Number of units of a kind from which on it is a kind of layers."""

AllocateSlots = Callable[[Sequence[int]], list[torch.Tensor]]
"""Makes uint8 tensors of the given numbers of bytes, whose contents are undefined."""


def plan_slots(
    kinds: Sequence[str], nbytes: Sequence[int | None], depths: Sequence[int] | None = None
) -> tuple[list[int], list[int]]:
    """The number of each unit's slot, and the bytes of each slot.

    kinds, nbytes: of the units, in the order in which they run. The root is the last one, whose
        weights are there while any others are. None: the unit needs no slot. It gets the root's
        number and takes nothing of it.
    depths: inside how many other units each one is, the root aside; None if none is inside another.
    """
    needed = [size or 0 for size in nbytes]
    depths = depths or [0] * len(kinds)
    root = len(kinds) - 1
    taking = [i for i in range(root) if nbytes[i] is not None]
    count = Counter(kinds[i] for i in taking)
    layers = [i for i in taking if count[kinds[i]] >= REPEATED]
    others = [i for i in taking if count[kinds[i]] < REPEATED]
    slot_of = {}
    sizes: list[int] = []
    # Layers of each depth take two slots in turn.
    for depth in sorted({depths[i] for i in layers}):
        level = [i for i in layers if depths[i] == depth]
        first = len(sizes)
        for position, ordinal in enumerate(level):
            slot_of[ordinal] = first + position % 2
        largest = max(needed[i] for i in level)
        sizes += [largest] * min(len(level), 2)
    # Others have a slot each, or share one as the first and the last unit.
    if _surround(others, layers):
        for ordinal in others:
            slot_of[ordinal] = len(sizes)
        sizes.append(max(needed[i] for i in others))
    else:
        for ordinal in others:
            slot_of[ordinal] = len(sizes)
            sizes.append(needed[ordinal])
    # The root has its own, whose number units without a slot get as well.
    last = len(sizes)
    sizes.append(needed[root])
    return [slot_of.get(i, last) for i in range(len(kinds))], sizes


def _surround(others: Sequence[int], layers: Sequence[int]) -> bool:
    """True if `others` are two units, one of which runs before all layers and one behind them."""
    if len(others) != 2 or not layers:
        return False
    return others[0] < layers[0] and layers[-1] < others[1]


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def bucket_dtype(layout: GroupLayout, comm: torch.dtype, narrows: bool) -> torch.dtype:
    """The dtype of a group's bucket: `comm`, or the dtype of its gradients if that is narrower.

    narrows: the latter is allowed (`EngineConfig.narrows_buckets`), where autograd gives all the
    gradients. Every backward copies one gradient of each parameter into a fresh bucket, so a cast
    to `comm` would add no bits to it."""
    if not narrows or not all(spec.from_autograd for spec in layout.specs):
        return comm
    dtype = layout.specs[0].dtype
    return dtype if dtype.itemsize < comm.itemsize else comm


def bucket_bytes(layout: GroupLayout, comm: torch.dtype, narrows: bool) -> int:
    """Bytes of a group's bucket; 0 if the group is frozen."""
    if not layout.specs[0].requires_grad:
        return 0
    return layout.total_numel * bucket_dtype(layout, comm, narrows).itemsize


def weights_in_slot(unit: Sequence[GroupLayout]) -> int:
    """Bytes that the gathered weights of a unit's groups take of a slot."""
    total = 0
    for layout in unit:
        for plane in layout.format.planes:
            total += aligned(plane.nbytes(layout.total_numel))
    return total


def buckets_in_slot(unit: Sequence[GroupLayout], comm: torch.dtype, narrows: bool) -> int:
    """Bytes that the buckets of a unit's groups take of a slot; see `bucket_dtype`."""
    return sum(aligned(bucket_bytes(one, comm, narrows)) for one in unit)


class Slot:
    """One unit's use of a slot, whose memory is handed out buffer by buffer. Without `number` and
    `memory` the unit has no slot: its storage comes and goes."""

    def __init__(self, number: int | None = None, memory: torch.Tensor | None = None) -> None:
        # Units whose slots have one number share its memory; None if storage comes and goes.
        self.number = number
        # All of the slot's memory, uint8.
        self.memory = memory
        # How many bytes of it buffers of this unit have.
        self._taken = 0

    def take(self, nbytes: int) -> torch.Tensor | None:
        """The next `nbytes` of the slot's memory, for life; None without a slot."""
        if self.memory is None:
            return None
        start = self._taken
        self._taken += aligned(nbytes)
        return self.memory[start : start + nbytes]


def make_slots(
    kinds: Sequence[str],
    nbytes: Sequence[int | None],
    depths: Sequence[int],
    allocate: AllocateSlots,
) -> list[Slot]:
    """The slot of each unit, in new memory; see `plan_slots`."""
    slot_of, sizes = plan_slots(kinds, nbytes, depths)
    memory = allocate(sizes) if any(sizes) else []
    slots = []
    for number, size in zip(slot_of, nbytes, strict=True):
        slots.append(Slot(number, memory[number]) if size else Slot())
    return slots


def ordinary_memory(device: torch.device) -> AllocateSlots:
    """Slots from the device's caching allocator."""

    def allocate(sizes: Sequence[int]) -> list[torch.Tensor]:
        return [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]

    return allocate


MAIN_WEIGHTS = "main_weights"
COMPUTE_WEIGHTS = "compute_weights"
GRADIENTS = "gradients"
SLOTS = "slots"
BUFFER_KINDS = (MAIN_WEIGHTS, COMPUTE_WEIGHTS, GRADIENTS, SLOTS)
"""Kinds of an engine's memory by purpose: `rollout/release.py` releases it between two steps, and
restores it."""

READ = (MAIN_WEIGHTS, COMPUTE_WEIGHTS, SLOTS)
"""Kinds of memory that a forward pass without gradients needs."""


def check_here(away: Collection[str], action: str, needed: Collection[str]) -> None:
    """Raises RuntimeError if a kind of memory that `action` has `needed` is `away`."""
    missing = [kind for kind in away if kind in needed]
    if missing:
        raise RuntimeError(
            f"{action}: {', '.join(missing)} of this model were released. Call "
            "return_memory(model, optimizer) first"
        )
