"""Gradients: from backward's `.grad` into buckets, through a reduction, into the main gradients.

    compute stream   fill bucket(2) | fill bucket(1) | wait(2), free bucket(2), fill bucket(0)
    reduce stream          reduce(2), add to shard   |   reduce(1), add to shard | ...

With sharded gradients every backward reduces each unit's fresh bucket and adds the result to the
gradient shard. Otherwise the kept gradients sum the microbatches on this rank and are reduced
once: in place, or through a transient bucket of the communication dtype. Either way the domain's
scale is applied to what goes into a reduction or to what came out of it, once, and never to a
running sum; docs/precision.md has the table.

Buckets are written by compute, so they are allocated and freed on the compute stream. One is
freed when its own reduction has passed, at the moment the bucket after next is needed; waiting
for the whole reduce stream was rejected, as it would wait for the reduction just launched.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from megatron_fsdp_adapter.core.comm.communicator import Communicator, Pair, Reduce
from megatron_fsdp_adapter.core.config import EngineConfig
from megatron_fsdp_adapter.core.runtime.device import COMPUTE, REDUCE, Runtime

from .buffer import FlatBuffer, copies_to
from .group import GradState, ParamGroup
from .launches import LaunchComparison
from .unit import Unit

MAX_BUCKETS = 2
"""Units whose buckets may exist at once: one that backward fills, one that is being reduced."""

REDUCED_STATES = (GradState.REDUCED, GradState.FINISHED)
FINISHED_STATES = (GradState.FINISHED,)


@dataclass(frozen=True)
class DomainReduce:
    """The way in which the gradients of a domain are reduced over one axis.

    Attributes:
        kind: what a launch is called (`launches.py`).
        into_shard: a reduction whose gradient shard holds nothing yet ends in that shard: there is
            nothing to copy.
        scale: of the domain. scaled: what that is applied to: "sent", what is communicated;
            "result", what comes out, where that has more bits than the main gradients, so that
            scaling adds no rounding; or "shard", the main gradients that received it. A result
            that is added to main gradients is scaled in the addition.
        received: fixed memory for what is received of one bucket after the other.
    """

    kind: str
    communicator: Communicator
    way: Reduce
    into_shard: bool = False
    scale: float = 1.0
    scaled: str = "sent"
    received: FlatBuffer | None = None

    def factor(self, place: str) -> float:
        """The factor to apply at `place`."""
        return self.scale if place == self.scaled else 1.0

    @property
    def after(self) -> float:
        """The factor on what came out of the reduction."""
        return 1.0 if self.scaled == "sent" else self.scale


@dataclass(frozen=True)
class Reduction:
    """The part of `group` in a launch; one for each of a group's launches with the same buffers.

    Attributes:
        segments: what is communicated. results: what comes out, where that is not in the shard.
        adds: the gradient shard holds what came before in this step, to which the result is added.
        in_slot: `segments` lie in a slot, which may be registered with NCCL.
        pairs: output and input of a reduce-scatter.
    """

    group: ParamGroup
    reduce: DomainReduce
    segments: Sequence[torch.Tensor]
    results: Sequence[torch.Tensor]
    adds: bool = False
    in_slot: bool = False

    @functools.cached_property
    def pairs(self) -> list[Pair]:
        return list(zip(self.outputs, self.segments, strict=True))

    @functools.cached_property
    def _to_shards(self) -> Callable[[Sequence[torch.Tensor]], None]:
        return copies_to(self.group.grad_segments)

    @property
    def outputs(self) -> Sequence[torch.Tensor]:
        """The outputs of a reduce-scatter."""
        in_shard = self.reduce.into_shard and not self.adds
        return self.group.grad_segments if in_shard else self.results

    def receive(self, segment: torch.Tensor) -> torch.Tensor:
        """Memory for the pieces that other ranks send of a segment, of the segment's kind: NCCL
        hangs if one end of an exchange is registered and the other, of gradients that are kept, is
        not. Collectives that no stream orders may overlap, and so share no memory."""
        received = self.reduce.received
        if received is None or not self.in_slot or received.runtime.host_waits:
            return torch.empty_like(segment)
        received.forget()
        return received.tensor[: segment.nbytes].view(segment.dtype)

    def scale_segments(self) -> None:
        """Before the reduction."""
        scale_each(self.segments, self.reduce.factor("sent"))

    def finish(self) -> None:
        """After the reduction: scales what came out and puts it into the main gradients, or adds it
        to what they hold."""
        reduce, shards = self.reduce, self.group.grad_segments
        if reduce.way.into_shards:
            return
        if self.group.reduced_hook is not None and self.group.domain.outer is None:
            scale_each(self.outputs, reduce.after)
            self.run_hook()
            reduce = replace(reduce, scale=1.0)
        if self.adds:
            for shard, result in zip(shards, self.results, strict=True):
                shard.add_(result, alpha=reduce.after)
            return
        scale_each(self.outputs, reduce.factor("result"))
        if not reduce.into_shard:
            self._to_shards(self.results)
        scale_each(shards, reduce.factor("shard"))

    def run_hook(self) -> None:
        """Gives what came out to the group's hook."""
        for output in self.outputs:
            self.group.reduced_hook(output)  # type: ignore[misc]


def scale_each(tensors: Sequence[torch.Tensor], scale: float) -> None:
    """One kernel each: see `copies_to`."""
    if scale != 1.0:
        for tensor in tensors:
            tensor.mul_(scale)


@dataclass(frozen=True)
class InFlight:
    """A reduction that was launched. Until `event` the groups keep its buckets alive, and it keeps
    `buffers`, which belong to no group."""

    groups: Sequence[ParamGroup]
    event: Any
    buffers: Sequence[FlatBuffer] = ()


def _same_memory(one: ParamGroup, other: ParamGroup) -> bool:
    slot = one.bucket_slot.number
    return one is other or (slot is not None and slot == other.bucket_slot.number)


def largest_domain_first(parts: Sequence[Reduction]) -> list[list[Reduction]]:
    """The parts of each domain, the domain with most elements first; equal on all ranks.

    Only a kernel that is launched between two units finds room beside compute at once: the next
    one waits for a large GEMM to end. On 4 GPUs that was 2 ms of a reduction's 7.
    """
    found: dict[str, list[Reduction]] = {}
    for part in parts:
        found.setdefault(part.group.key.domain, []).append(part)
    return sorted(
        found.values(), key=lambda mine: -sum(one.group.layout.total_numel for one in mine)
    )


class GradCheck(Protocol):
    """Looks at a step's gradients before they are communicated: `note` on the device, after each
    backward of a unit; `raise_found` on the host, at the end of the step."""

    def note(self, unit: Unit) -> None: ...

    def raise_found(self) -> None: ...

    def clear(self) -> None: ...


class ReducePipeline:
    """Args:
    domains, outer: by domain name, how gradients are reduced over each axis.
    launches: records every reduction.
    check: looks at gradients before they are communicated.
    """

    def __init__(
        self,
        config: EngineConfig,
        runtime: Runtime,
        domains: Mapping[str, DomainReduce],
        outer: Mapping[str, DomainReduce],
        launches: LaunchComparison,
        check: GradCheck | None = None,
    ) -> None:
        self.config, self.runtime = config, runtime
        self.domains, self.outer, self.launches = domains, outer, launches
        self._reductions: dict[tuple[int, bool], Reduction] = {}
        self._in_flight: deque[InFlight] = deque()
        # A rank without gradients launches in this order too, to match the others.
        self._outer_in_backward = False
        self.check = check
        # Whether a backward may follow a reduction over an outer axis, as if it had not been one.
        self.repeats_outer = False

    def backward_begins(self, unit: Unit, accumulates: bool) -> None:
        """Gives storage to the buckets that `unit`'s modules will write into by themselves;
        RuntimeError if the backward is not to accumulate gradients of weights."""
        groups = [group for group in unit.direct_groups if not group.idle]
        if not groups or all(group.direct.is_open for group in groups):
            return
        if not accumulates:
            raise RuntimeError(
                f"unit {unit.name}: a backward for gradients of inputs alone "
                "(torch.autograd.grad, backward(inputs=...)) goes through modules that write "
                "weight gradients to main_grad themselves. Set "
                "gradient_accumulation_fusion=False, and switch CUDA graphs of layers off"
            )
        with torch.no_grad():
            self._begin(unit, unit.active_groups)
            for group in groups:
                group.collected.allocate()
                group.direct.open(empty=group.grad_state is not GradState.ACCUMULATED)

    def abandon(self, units: Sequence[Unit]) -> None:
        """Forgets backwards that did not come to their end, and what they have written."""
        self.finish()
        for unit in units:
            for group in unit.direct_groups:
                group.direct.close()
                if not group.keeps_grads:
                    group.bucket.release()

    def backward_done(
        self, unit: Unit, is_last: bool, is_known_last: bool, more_may_come: bool = False
    ) -> None:
        """Takes the gradients of `unit`'s backward and reduces them if it is time to.

        is_last: no backward is known to follow in this step. is_known_last: none will, so that
        even what cannot be repeated, the reduction over an outer axis, may start. more_may_come:
        of this backward, so that kept gradients are not reduced yet.
        """
        groups = unit.active_groups
        if not groups:
            return
        self._outer_in_backward = is_known_last
        self._begin(unit, groups)
        for group in groups:
            self._take(group)
        self._note(unit)
        # With sharded gradients the caller need not know which microbatch is the last.
        launches = is_known_last if self.config.strategy.shard_grads else is_last
        launches &= self.config.overlap_grad_reduce and not more_may_come
        ready = [group for group in groups if launches or not group.keeps_grads]
        if ready:
            self._launch(ready)
        if is_known_last:
            self._finish_outer(groups)

    def _take(self, group: ParamGroup) -> None:
        """Takes a backward's gradients: into a fresh bucket, or to those of microbatches before."""
        group.collected.allocate()
        group.take_grads(accumulate=group.grad_state is GradState.ACCUMULATED)
        if group.keeps_grads:
            group.grad_state = GradState.ACCUMULATED

    def reduce_late_grads(self, unit: Unit) -> bool:
        """Takes gradients that came after `backward_done` where some are kept. Returns whether kept
        ones had to be reduced by themselves, since the others had been."""
        fresh = [group for group in unit.active_groups if not group.keeps_grads]
        groups = [group for group in unit.active_groups if group.keeps_grads]
        were_reduced = any(group.grad_state in REDUCED_STATES for group in groups)
        taken = [*fresh, *([] if were_reduced else groups)]
        self._begin(unit, taken)
        for group in taken:
            self._take(group)
        if taken:
            self._note(unit)
        if fresh:
            self._launch(fresh)
        if not were_reduced:
            return False
        if any(group.grad_state is GradState.FINISHED or group.direct.is_open for group in groups):
            raise RuntimeError(
                f"unit {unit.name}: gradients came after its last reduction was launched, because "
                "a part of the graph is older than the unit's call. Use a context of autocast "
                "for each forward, torch.autocast(cache_enabled=False), or "
                "overlap_grad_reduce=False"
            )
        self._reduce_again(groups)
        return True

    def _reduce_again(self, groups: Sequence[ParamGroup]) -> None:
        """Reduces gradients that came late and adds them to the main gradients, which have been
        reduced."""
        self._make_room(groups)
        buffers: list[FlatBuffer] = []
        late: list[Reduction] = []
        for group in groups:
            buffer, how = group.collect_late(), self.domains[group.key.domain]
            segments, results = buffer.segments(group.full), buffer.segments(group.inner)
            buffers.append(buffer)
            late.append(Reduction(group, how, segments, results, True))
            late[-1].scale_segments()
        self.runtime.follow(REDUCE, COMPUTE)
        for reduction in late:
            self.runtime.submit(
                REDUCE, functools.partial(self._communicate, [reduction]), reduction.finish
            )
        self._in_flight.append(InFlight((), self.runtime.record(REDUCE), buffers))

    def _note(self, unit: Unit) -> None:
        if self.check is not None:
            self.check.note(unit)

    def _begin(self, unit: Unit, groups: Sequence[ParamGroup]) -> None:
        """Makes room for the gradients of a backward, which are written next; RuntimeError if it
        comes too late."""
        self._take_back(groups)
        self._refuse_late(unit, groups)
        fresh = [group for group in groups if not group.keeps_grads]
        if fresh:
            self._make_room(fresh)

    def _take_back(self, groups: Sequence[ParamGroup]) -> None:
        """A further backward follows. Gradients that one rank has and that were scaled as the
        step's are added to as before. Of a sum over replicas each one keeps an equal part. What a
        hook has changed stays."""
        for group in (one for one in groups if one.reduced_hook is None):
            if group.is_single_rank and group.grad_state is GradState.REDUCED:
                self.runtime.follow(COMPUTE, REDUCE)
                scale_each(group.grad_segments, 1.0 / self.domains[group.key.domain].scale)
                group.grad_state = GradState.ACCUMULATED
            elif group.grad_state is GradState.FINISHED and self.repeats_outer and not (
                group.keeps_grads or group.splits_outer
            ):
                self.runtime.follow(COMPUTE, REDUCE)
                scale_each(group.grad_segments, 1.0 / group.domain.outer_size)
                group.grad_state = GradState.REDUCED

    def _refuse_late(self, unit: Unit, groups: Sequence[ParamGroup]) -> None:
        if any(
            group.grad_state in (REDUCED_STATES if group.keeps_grads else FINISHED_STATES)
            for group in groups
        ):
            raise RuntimeError(
                f"unit {unit.name}: a backward ran after this step's gradients had been reduced. "
                "Run all backwards of a step but the last under no_sync(), and set all gradients "
                "to None before the next step"
            )

    def reduce_rest(self, units: Iterable[Unit]) -> None:
        """Reduces whatever the backwards of this step have not: kept gradient buffers that were
        not overlapped, groups that no backward reached (their gradients are zero), and what is
        missing over the outer axis: behind all that, or unit by unit if backwards do that."""
        units = list(units)
        for unit in units:
            groups = [
                group
                for group in unit.trainable_groups
                if group.grad_state not in REDUCED_STATES
                and not (group.idle and group.grad_state is GradState.EMPTY)
            ]
            self._make_room(groups)
            for group in groups:
                if group.grad_state is GradState.EMPTY:
                    group.collected.allocate()
                    group.take_grads(accumulate=False)
            if groups:
                self._launch(groups)
            if self._outer_in_backward:
                self._finish_outer(unit.trainable_groups)
        for unit in sorted(units, key=lambda unit: -unit.ordinal):
            self._finish_outer(unit.trainable_groups)

    def _launch(self, groups: Sequence[ParamGroup]) -> None:
        """Starts reducing what was collected; coalesced per domain."""
        transient = [group for group in groups if group.has_transient_bucket]
        if any(group.keeps_grads for group in transient):
            self._make_room(transient)
        reductions = [self._reduction_of(group) for group in groups]
        for reduction in reductions:
            group = reduction.group
            group.fill_bucket()
            reduction.scale_segments()
            group.grad.allocate()
            group.grad_state = GradState.REDUCED
        self.runtime.follow(REDUCE, COMPUTE)
        self.runtime.launch(
            REDUCE,
            lambda: self._communicate(reductions),
            *[reduction.finish for reduction in reductions],
        )
        if transient:
            self._in_flight.append(InFlight(transient, self.runtime.record(REDUCE)))

    def _reduction_of(self, group: ParamGroup) -> Reduction:
        adds = group.grad_state in REDUCED_STATES
        known = self._reductions.get((id(group), adds))
        if known is None:
            how, in_slot = self.domains[group.key.domain], group.bucket_slot.memory is not None
            segments = group.bucket.segments(group.full)
            results = group.bucket.segments(group.inner)
            known = Reduction(group, how, segments, results, adds, in_slot)
            self._reductions[id(group), adds] = known
        return known

    def _finish_outer(self, groups: Sequence[ParamGroup]) -> None:
        """Starts the reduction over the outer axis of what has been reduced over the shard axis:
        once a step, since it is the slow network, and a sum cannot be taken back."""
        ready = [
            group
            for group in groups
            if group.grad_state is GradState.REDUCED and group.key.domain in self.outer
        ]
        for group in ready:
            group.grad_state = GradState.FINISHED
        parts = [
            Reduction(group, self.outer[group.key.domain], group.grad_segments, group.held_grads)
            for group in ready
        ]
        if parts:
            self.runtime.submit(
                REDUCE, lambda: self._communicate(parts),
                *(part.run_hook for part in parts if part.group.reduced_hook is not None),
            )  # fmt: skip

    def _communicate(self, reductions: Sequence[Reduction]) -> list[Any]:
        """Launches reductions over one axis."""
        works = []
        for mine in largest_domain_first(reductions):
            how = mine[0].reduce
            self.launches.note(how.kind, [one.group for one in mine], how.communicator)
            works += how.way.launch(how.communicator, mine)
        return works

    def _make_room(self, groups: Sequence[ParamGroup]) -> None:
        """Frees the oldest buckets until one more may exist and none of `groups` is in flight: a
        model of one unit fills the very bucket that its last microbatch is still reducing. A unit
        in the same slot counts as the same."""
        while self._in_flight and (
            len(self._in_flight) >= MAX_BUCKETS
            or any(
                _same_memory(one, group)
                for flight in self._in_flight
                for one in flight.groups
                for group in groups
            )
        ):
            self._retire()

    def _retire(self) -> None:
        """Frees the buckets of the oldest reduction, behind that reduction alone."""
        oldest = self._in_flight.popleft()
        self.runtime.wait(COMPUTE, oldest.event)
        for group in oldest.groups:
            group.release_bucket()

    def retire_all(self) -> None:
        """Frees all buckets, behind their reductions. Called in the middle of a forward pass, where
        those of the microbatch before have long passed: at its end memory is scarcest."""
        while self._in_flight:
            self._retire()

    def finish(self) -> None:
        """Orders the compute stream behind every reduction and frees all buckets."""
        self.retire_all()
        self.runtime.follow(COMPUTE, REDUCE)
