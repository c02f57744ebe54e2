"""Where gathered weights and reduce buckets are: storage that comes and goes, or fixed slots.

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
from dataclasses import dataclass

import torch

from megatron_fsdp_adapter.core.config import EngineConfig
from megatron_fsdp_adapter.core.layout.group import GroupLayout
from megatron_fsdp_adapter.core.runtime.device import Runtime

ALIGNMENT = 512
"""Bytes; of each flat buffer in a slot."""

REPEATED = 3
"""How many units of a kind make it one of layers."""

AllocateSlots = Callable[[Sequence[int]], list[torch.Tensor]]
"""Makes uint8 tensors of the given numbers of bytes, whose contents are undefined."""


@dataclass(frozen=True)
class PoolPlan:
    """slot_of: the slot of each unit, by ordinal. nbytes: of each slot."""

    slot_of: tuple[int, ...]
    nbytes: tuple[int, ...]


def plan_pool(
    kinds: Sequence[str], nbytes: Sequence[int], depths: Sequence[int] | None = None,
    takes: Sequence[bool] | None = None,
) -> PoolPlan:
    """Shares slots out over units of the given kinds and sizes, in the order in which they run;
    the last one is the root, which is there while any other is. depths: inside how many other
    units each one is, the root aside; None if inside none. takes: whether each has need of a slot;
    None if all have. A unit without one gets the root's number and takes nothing of it."""
    takes = takes or [True] * len(kinds)
    nbytes = [size if take else 0 for size, take in zip(nbytes, takes, strict=True)]
    taking = [i for i in range(len(kinds) - 1) if takes[i]]
    count = Counter(kinds[i] for i in taking)
    depths = depths or [0] * len(kinds)
    layers = [i for i in taking if count[kinds[i]] >= REPEATED]
    others = [i for i in taking if count[kinds[i]] < REPEATED]
    slot_of, largest, used = [-1] * len(kinds), {}, 0
    for depth in sorted({depths[i] for i in layers}):
        level = [i for i in layers if depths[i] == depth]
        most = max(nbytes[i] for i in level)
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
        sizes[slot] = max(sizes[slot], largest.get(ordinal, nbytes[ordinal]))
    return PoolPlan(tuple(slot_of), tuple(sizes))


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def bucket_dtype(layout: GroupLayout, comm: torch.dtype, narrows: bool) -> torch.dtype:
    """Of a group's bucket: `comm`, or where the unit `narrows` buckets (`EngineConfig`) the dtype
    that autograd gives all of its gradients, if that is narrower. Every backward copies one
    gradient of each parameter into a fresh bucket, so a cast to `comm` would add nothing to it."""
    dtype = layout.specs[0].dtype
    alike = all(spec.from_autograd for spec in layout.specs)
    return dtype if narrows and alike and dtype.itemsize < comm.itemsize else comm


def bucket_bytes(layout: GroupLayout, comm: torch.dtype, narrows: bool) -> int:
    """Of a group's bucket; none where it is frozen."""
    if not layout.specs[0].requires_grad:
        return 0
    return layout.total_numel * bucket_dtype(layout, comm, narrows).itemsize


def plan_weights_and_buckets(
    kinds: Sequence[str],
    units: Sequence[Sequence[GroupLayout]],
    comm: torch.dtype,
    depths: Sequence[int] | None = None,
    gathered: Sequence[bool] | None = None,
    collected: Sequence[bool] | None = None,
    narrows: Sequence[bool] | None = None,
) -> tuple[PoolPlan, PoolPlan]:
    """Slots of gathered weights, and of buckets, from the layouts of each unit's groups; `kinds`
    and `depths` as for `plan_pool`, `comm` and `narrows` of each unit as for `bucket_dtype`.
    gathered, collected: whether weights, and gradients, of each unit come and go at all."""
    weights = [sum(_planes_in_slot(one) for one in unit) for unit in units]
    buckets = [
        sum(aligned(bucket_bytes(one, comm, narrow)) for one in unit)
        for unit, narrow in zip(units, narrows or [False] * len(units), strict=True)
    ]
    return (
        plan_pool(kinds, weights, depths, gathered),
        plan_pool(kinds, buckets, depths, collected),
    )


def _planes_in_slot(layout: GroupLayout) -> int:
    return sum(aligned(plane.nbytes(layout.total_numel)) for plane in layout.format.planes)


class BufferPool:
    """The memory of a plan. `take` hands out one unit's part of its slot, buffer by buffer."""

    def __init__(self, plan: PoolPlan, allocate: AllocateSlots) -> None:
        self.plan = plan
        self.memory = allocate(plan.nbytes)
        self._taken = [0] * len(plan.slot_of)

    def take(self, ordinal: int, nbytes: int) -> torch.Tensor:
        start = self._taken[ordinal]
        self._taken[ordinal] += aligned(nbytes)
        return self.memory[self.plan.slot_of[ordinal]][start : start + nbytes]


@dataclass(frozen=True)
class UnitBuffers:
    """Where the transient buffers of unit number `ordinal` lie: in slots, or in storage that comes
    and goes."""

    runtime: Runtime
    ordinal: int = 0
    weights: BufferPool | None = None
    buckets: BufferPool | None = None

    def weight_memory(self, nbytes: int) -> torch.Tensor | None:
        """Memory for life of so many bytes of gathered weights; None if they come and go."""
        return None if self.weights is None else self.weights.take(self.ordinal, nbytes)

    def bucket_memory(self, nbytes: int) -> torch.Tensor | None:
        """The same of a reduce bucket."""
        return None if self.buckets is None else self.buckets.take(self.ordinal, nbytes)

    @property
    def weight_slot(self) -> int | None:
        return None if self.weights is None else self.weights.plan.slot_of[self.ordinal]

    @property
    def bucket_slot(self) -> int | None:
        return None if self.buckets is None else self.buckets.plan.slot_of[self.ordinal]


def unit_buffers(
    runtime: Runtime, ordinal: int, config: EngineConfig, weights: BufferPool | None,
    buckets: BufferPool | None,
) -> UnitBuffers:
    """Of a unit of this configuration, with the slots of those that have any."""
    return UnitBuffers(
        runtime, ordinal, weights if config.strategy.shard_weights else None,
        buckets if config.has_buckets else None,
    )


def ordinary_memory(device: torch.device) -> AllocateSlots:
    """Slots from the device's caching allocator."""
    return lambda sizes: [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
