"""Storage of gathered weights and reduce buckets: allocated and freed, or in fixed slots.

By default every buffer takes storage from the caching allocator and gives it back. A *slot* is
memory for life that several units use in turn (`fsdp_double_buffer`), so that it can be registered
with NCCL once (`nccl_ub`), and addresses do not change. The rules:

    which   a unit's slot is fixed. Units of a kind of which there are three or more (layers) take
            two slots in turn, sized by the largest of them all; those inside other units (parts
            of a layer) take two of their own. Every other unit has a slot of its own, but for two
            of them that run first and last (embedding, output layer), which share one.
    owner   a slot belongs to the unit that was gathered into it last. A unit takes it over when the
            other has been resharded; asked for by its module, also when the other is not
            computing (kept for a backward, gathered ahead), which then is gathered again. Two units
            that compute at once, one inside the other, cannot share a slot: an error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import torch

from megatron_fsdp_adapter.core.layout.group import GroupLayout

ALIGNMENT = 512
"""Bytes; of each flat buffer in a slot."""

REPEATED = 3
"""Number of units of a kind from which on it is a kind of layers."""

AllocateSlots = Callable[[Sequence[int]], list[torch.Tensor]]
"""Makes uint8 tensors of the given numbers of bytes, whose contents are undefined."""


def plan_slots(
    kinds: Sequence[str], nbytes: Sequence[int | None], depths: Sequence[int] | None = None
) -> tuple[list[int], list[int]]:
    """The slot of each unit, and the bytes of each slot, for units of the given kinds and sizes, in
    the order in which they run; the last one is the root, which is there while any other is. A unit
    whose size is None has no need of a slot: it gets the root's number and takes nothing of it.
    depths: inside how many other units each one is, the root aside; None if inside none."""
    needed = [size or 0 for size in nbytes]
    taking = [i for i in range(len(kinds) - 1) if nbytes[i] is not None]
    count = Counter(kinds[i] for i in taking)
    depths = depths or [0] * len(kinds)
    layers = [i for i in taking if count[kinds[i]] >= REPEATED]
    others = [i for i in taking if count[kinds[i]] < REPEATED]
    slot_of, largest, used = [-1] * len(kinds), {}, 0
    for depth in sorted({depths[i] for i in layers}):
        level = [i for i in layers if depths[i] == depth]
        most = max(needed[i] for i in level)
        for position, ordinal in enumerate(level):
            slot_of[ordinal] = used + position % 2
            largest[ordinal] = most
        used += min(len(level), 2)
    ends = len(others) == 2 and bool(layers) and others[0] < layers[0] and layers[-1] < others[1]
    for position, ordinal in enumerate(others):
        slot_of[ordinal] = used if ends else used + position
    slot_of[-1] = used + (1 if ends else len(others))
    slot_of = [slot_of[-1] if slot < 0 else slot for slot in slot_of]
    sizes = [0] * (slot_of[-1] + 1)
    for ordinal, slot in enumerate(slot_of):
        sizes[slot] = max(sizes[slot], largest.get(ordinal, needed[ordinal]))
    return slot_of, sizes


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def bucket_dtype(layout: GroupLayout, comm: torch.dtype, narrows: bool) -> torch.dtype:
    """The dtype of a group's bucket: `comm`, or where the unit `narrows` buckets
    (`EngineConfig`) the dtype that autograd gives all of its gradients, if that is narrower.
    Every backward copies one gradient of each parameter into a fresh bucket, so a cast to `comm`
    would add nothing to it."""
    dtype = layout.specs[0].dtype
    alike = all(spec.from_autograd for spec in layout.specs)
    return dtype if narrows and alike and dtype.itemsize < comm.itemsize else comm


def bucket_bytes(layout: GroupLayout, comm: torch.dtype, narrows: bool) -> int:
    """Bytes of a group's bucket; 0 if the group is frozen."""
    if not layout.specs[0].requires_grad:
        return 0
    return layout.total_numel * bucket_dtype(layout, comm, narrows).itemsize


def weights_in_slot(unit: Sequence[GroupLayout]) -> int:
    """Bytes that the gathered weights of a unit's groups take of a slot."""
    planes = ((plane, one.total_numel) for one in unit for plane in one.format.planes)
    return sum(aligned(plane.nbytes(numel)) for plane, numel in planes)


def buckets_in_slot(unit: Sequence[GroupLayout], comm: torch.dtype, narrows: bool) -> int:
    """Bytes that their buckets take; see `bucket_dtype`."""
    return sum(aligned(bucket_bytes(one, comm, narrows)) for one in unit)


class Slot:
    """One unit's use of memory that others use in turn: handed out buffer by buffer. Without a
    number and memory, of storage that comes and goes."""

    def __init__(self, number: int | None = None, memory: torch.Tensor | None = None) -> None:
        self.number, self.memory, self._taken = number, memory, 0

    def take(self, nbytes: int) -> torch.Tensor | None:
        """Memory for life of so many bytes; None if they come and go."""
        if self.memory is None:
            return None
        start = self._taken
        self._taken += aligned(nbytes)
        return self.memory[start : start + nbytes]


def make_slots(
    kinds: Sequence[str], nbytes: Sequence[int | None], depths: Sequence[int],
    allocate: AllocateSlots,
) -> list[Slot]:
    """Makes the slots of each unit; see `plan_slots`."""
    slot_of, sizes = plan_slots(kinds, nbytes, depths)
    memory = allocate(sizes) if any(sizes) else []
    needed = zip(slot_of, nbytes, strict=True)
    return [Slot(slot, memory[slot]) if size else Slot() for slot, size in needed]


def ordinary_memory(device: torch.device) -> AllocateSlots:
    """Slots from the device's caching allocator."""
    return lambda sizes: [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
