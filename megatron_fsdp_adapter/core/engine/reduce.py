"""Gradients: from backward's `.grad` into buckets, through a reduction, into the main gradients.

    compute stream   fill bucket(2) | fill bucket(1) | wait(2), free bucket(2), fill bucket(0)
    reduce stream          reduce(2), add to shard   |   reduce(1), add to shard | ...

With sharded gradients every backward reduces each unit's fresh bucket and adds the result to the
gradient shard. Otherwise the kept gradients sum the microbatches on this rank and are reduced
once: in place, or through a transient bucket of the communication dtype. Either way the domain's
scale is applied to what goes into a reduction or to what came out of it, once, and never to a
running sum; docs/precision.md has the table.

Gradients that need no cast, of parameters that are segments of their own (`even_rows`), are reduced
where autograd has left them, if the reduction only reads them.

Buckets are written by compute, so they are allocated and freed on the compute stream. One is
freed when its own reduction has passed, at the moment the bucket after next is needed; waiting
for the whole reduce stream was rejected, as it would wait for the reduction just launched.
"""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Protocol

import torch

from megatron_fsdp_adapter.core.comm.communicator import LaunchLog
from megatron_fsdp_adapter.core.config import EngineConfig
from megatron_fsdp_adapter.core.runtime.device import COMPUTE, REDUCE, Runtime

from .grad_states import REDUCED_STATES, GradState
from .group import ParamGroup
from .reduction import DomainReduce, InFlight, Reduction, largest_domain_first, scale_each
from .step import Last
from .unit import Unit

MAX_BUCKETS = 2
"""Units whose buckets may exist at once: one that backward fills, one that is being reduced. The
memory formula (`plan/memory.py`) reads it."""

FINISHED_STATES = (GradState.FINISHED,)

InPlace = Mapping[ParamGroup, Sequence[torch.Tensor]]
"""Gradients by group, 1-D, that are reduced where autograd has left them."""


def _is_unreduced(group: ParamGroup) -> bool:
    """True if the step still has to reduce gradients of `group`: zeros if it was given none."""
    grads = group.grads
    if grads.state is GradState.EMPTY:
        return not grads.is_idle
    return grads.is_summed or grads.state not in REDUCED_STATES


class ChecksGradients(Protocol):
    """Looks at a step's gradients before they are communicated: `note` on the device, after each
    backward of a unit; `raise_found` on the host, at the end of the step."""

    def note(self, unit: Unit) -> None: ...

    def raise_found(self) -> None: ...

    def clear(self) -> None: ...


class ReducePipeline:
    """Takes gradients from backward and reduces them.

    Args:
        domains, outer: by domain name, how gradients are reduced over each axis.
        log: notes every reduction.
        check: looks at gradients before they are communicated.
    """

    def __init__(
        self,
        config: EngineConfig,
        runtime: Runtime,
        domains: Mapping[str, DomainReduce],
        outer: Mapping[str, DomainReduce],
        log: LaunchLog,
        check: ChecksGradients | None = None,
    ) -> None:
        self.config = config  # of the engine
        # Whether gradients of any domain are sharded.
        self._shards_grads = any(row.shard_grads for row in config.strategies)
        self.runtime = runtime  # streams and storage
        self.domains = domains  # by domain, how gradients are reduced over the shard axis
        self._scales: dict[int, float] = {}  # by group, another factor than that of its domain
        self.outer = outer  # by domain, how they are reduced over the outer axis
        self.log = log  # notes every reduction
        self.check = check  # looks at gradients before they are communicated
        # Reductions of groups, by identity, `adds` and `is_partial`; made once.
        self._reductions: dict[tuple[int, bool, bool], Reduction] = {}
        # Groups whose partial sums were reduced over the outer axis, and may be released.
        self._partial: list[ParamGroup] = []
        # Launched reductions that may still read their buckets, oldest first.
        self._in_flight: deque[InFlight] = deque()
        # Whether backwards of this step reduce over outer axes, unit by unit. A rank without
        # gradients launches in this order too, to match the others.
        self._outer_in_backward = False
        # Whether a backward may follow a reduction over an outer axis, which is then taken back
        # (`_take_back`).
        self.repeats_outer = False

    def scale_sums(self, groups: Sequence[ParamGroup], scale: float) -> None:
        """Sets the factor on sums of gradients of `groups`, in reductions from now on.

        RuntimeError: gradients are there that one rank has reduced by itself, so that a further
        backward of their step could not take the former factor back.
        """
        for group in groups:
            has_grads = group.key.requires_grad and group.grads.state is GradState.REDUCED
            if group.is_single_rank and has_grads:
                raise RuntimeError(
                    f"a factor of gradients was set while {group.grads.name} has gradients. Set it "
                    "before the first backward of a step, after zero_grad()"
                )
        for group in groups:
            self._scales[id(group)] = scale
            for adds, is_partial in itertools.product((False, True), repeat=2):
                self._reductions.pop((id(group), adds, is_partial), None)

    def _way(self, group: ParamGroup, is_partial: bool = False) -> DomainReduce:
        """The reduction of `group` over the shard axis."""
        way = self.domains[group.key.domain]
        way = way.of(group.config, self._scales.get(id(group), way.scale))
        return way.to_partial(group.config.policy.comm_dtype) if is_partial else way

    def repeat_outer(self) -> None:
        """Lets further backwards follow a reduction over an outer axis."""
        self.repeats_outer = True

    def backward_begins(self, unit: Unit, *, accumulates: bool) -> None:
        """Gives storage to the buckets that `unit`'s modules will write into by themselves.

        Raises:
            RuntimeError: there are such buckets, and the backward does not accumulate gradients of
                weights; or this backward comes too late (`_refuse_late`).
        """
        groups = [group for group in unit.direct_groups if not group.grads.is_idle]
        if not groups or all(group.grads.direct.is_open for group in groups):
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
                grads = group.grads
                grads.collected.allocate()
                grads.direct.open(empty=grads.state is not GradState.ACCUMULATED)

    def abandon(self, units: Sequence[Unit]) -> None:
        """Forgets backwards that did not come to their end. Closes what their modules write into,
        and releases those buckets, but for kept gradients."""
        self.finish()
        for unit in units:
            for group in unit.direct_groups:
                group.grads.direct.close()
                if not group.grads.is_kept:
                    group.grads.bucket.release()

    def backward_done(self, unit: Unit, last: Last, *, more_may_come: bool = False) -> None:
        """Takes the gradients of `unit`'s backward and reduces them if it is time to.

        last: whether it is the last backward of this step. Only if that is known may the reduction
            over an outer axis start, which cannot be repeated.
        more_may_come: this backward may give `unit` more gradients, so that kept gradients are not
            reduced yet.
        """
        groups = unit.active_groups
        if unit.defers:  # what is not reduced needs no zeros
            groups = [one for one in groups if not one.grads.is_kept or one.grads.has_untaken()]
        if not groups:
            return
        is_known_last = last is Last.YES
        self._outer_in_backward = is_known_last
        self._begin(unit, groups)
        in_place = self._take(groups)
        self._note(unit)
        ready = groups
        # In a model with sharded gradients the caller need not know which microbatch is the last.
        # Groups that keep theirs are reduced only in a backward that is known to be it, or if the
        # user says so.
        ends = is_known_last if self._shards_grads else last is not Last.NO
        if unit.defers is not None:
            ends = not unit.defers
        if not ends or more_may_come or not self.config.overlap_grad_reduce:
            ready = [group for group in groups if not group.grads.is_kept]
        if ready:
            self._launch(ready, in_place)
        if is_known_last:
            self._finish_outer(groups)

    def _take(self, groups: Sequence[ParamGroup]) -> InPlace:
        """Takes a backward's gradients: into fresh buckets, or added to those of microbatches
        before. Returns those that stay where they are until they are reduced, by group."""
        in_place = {}
        for group in groups:
            grads = group.grads
            may_stay = grads.may_stay and not grads.is_kept and self.check is None
            if may_stay and self._reduction_of(group).only_reads:
                found = grads.take_in_place()
                if found is not None:
                    in_place[group] = found
                    continue
            grads.collected.allocate()
            grads.take(accumulate=grads.is_summed)
            if grads.is_kept:
                grads.were_summed()
        return in_place

    def reduce_late_grads(self, unit: Unit) -> bool:
        """Takes gradients that came after `backward_done`, in a unit that keeps some. Returns
        whether kept gradients had been reduced before, so that the late ones were reduced by
        themselves."""
        fresh = [group for group in unit.active_groups if not group.grads.is_kept]
        groups = [group for group in unit.active_groups if group.grads.is_kept]
        were_reduced = not unit.defers and any(
            group.grads.state in REDUCED_STATES and not group.grads.is_summed for group in groups
        )
        taken = fresh if were_reduced else [*fresh, *groups]
        self._begin(unit, taken)
        in_place = self._take(taken)
        if taken:
            self._note(unit)
        if fresh:
            self._launch(fresh, in_place)
        if not were_reduced:
            return False
        for group in groups:
            if group.grads.state is GradState.FINISHED or group.grads.direct.is_open:
                raise RuntimeError(
                    f"unit {unit.name}: gradients came after its last reduction was launched, "
                    "because a part of the graph is older than the unit's call. Use a context of "
                    "autocast for each forward, torch.autocast(cache_enabled=False), or "
                    "overlap_grad_reduce=False"
                )
        self._reduce_again(groups)
        return True

    def _reduce_again(self, groups: Sequence[ParamGroup]) -> None:
        """Reduces gradients that came late and adds them to the main gradients, which have been
        reduced."""
        self._make_room(groups)
        buffers = []
        late = []
        for group in groups:
            buffer = group.grads.take_late()
            buffers.append(buffer)
            is_partial = group.grads.has_partial
            reduction = Reduction(
                group,
                self._way(group, is_partial),
                segments=buffer.segments(group.shards.full),
                results=buffer.segments(group.shards.inner),
                adds=True,
                is_partial=is_partial,
            )
            late.append(reduction)
            reduction.scale_segments()
        self.runtime.follow(REDUCE, COMPUTE)
        for reduction in late:
            launch = functools.partial(self._communicate, [reduction])
            self.runtime.submit(REDUCE, launch, reduction.finish)
        self._in_flight.append(InFlight((), self.runtime.record(REDUCE), buffers))

    def _note(self, unit: Unit) -> None:
        if self.check is not None:
            self.check.note(unit)

    def _begin(self, unit: Unit, groups: Sequence[ParamGroup]) -> None:
        """Makes room for the gradients of a backward, which are written next. RuntimeError if that
        backward comes too late."""
        self._take_back([group for group in groups if not group.grads.keeps_sums])
        self._refuse_late(unit, groups)
        fresh = [group for group in groups if not group.grads.is_kept]
        for group in groups:
            grads = group.grads
            if grads.keeps_sums and not grads.is_summed:  # an earlier reduction may use the bucket
                fresh.append(group)
        if fresh:
            self._make_room(fresh)

    def _take_back(self, groups: Sequence[ParamGroup]) -> None:
        """Takes back a reduction before a further backward adds to its result.

        * In a domain of one rank the scale is taken back: gradients are kept as before it.
        * Of a sum over the outer axis each replica keeps an equal part, where that is repeated.
        * Gradients that a hook has changed stay as they are.
        """
        for group in groups:
            grads = group.grads
            grads.load_from_host()
            if grads.reduced_hook is not None:
                continue
            is_alone = group.is_single_rank and grads.is_kept and not grads.keeps_sums
            if is_alone and grads.state is GradState.REDUCED:
                self.runtime.follow(COMPUTE, REDUCE)
                scale_each(grads.inner_segments, 1.0 / self._way(group).total)
                grads.advance(GradState.ACCUMULATED)
            elif grads.state is GradState.FINISHED and self._can_take_back(group):
                self.runtime.follow(COMPUTE, REDUCE)
                scale_each(grads.inner_segments, 1.0 / group.domain.outer_size)
                grads.advance(GradState.REDUCED)

    def _can_take_back(self, group: ParamGroup) -> bool:
        """True if a reduction over the outer axis may be taken back."""
        grads = group.grads
        if not self.repeats_outer or grads.is_kept or grads.partial is not None:
            return False
        return not group.shards.splits_outer

    def _refuse_late(self, unit: Unit, groups: Sequence[ParamGroup]) -> None:
        for group in groups:
            grads = group.grads
            in_main = grads.is_kept and not grads.keeps_sums
            too_late = REDUCED_STATES if in_main else FINISHED_STATES
            if grads.state in too_late and grads.partial is None:
                raise RuntimeError(
                    f"unit {unit.name}: a backward ran after this step's gradients had been "
                    "reduced. Run all backwards of a step but the last under no_sync(), and set "
                    "all gradients to None before the next step"
                )

    def reduce_rest(self, units: Sequence[Unit]) -> None:
        """Reduces what the backwards of this step have not:

        * kept gradients whose reduction was not overlapped, but not those that the user defers;
        * groups that no backward reached, whose gradients are zero;
        * over the outer axis, what is missing there: unit by unit if backwards did that, and else
          behind all reductions over the shard axis.
        """
        for unit in units:
            unreduced = [group for group in unit.trainable_groups if _is_unreduced(group)]
            groups = [] if unit.defers else unreduced
            self._make_room(groups)
            for group in groups:
                if group.grads.state is GradState.EMPTY:
                    group.grads.collected.allocate()
                    group.grads.take(accumulate=False)
            if groups:
                self._launch(groups)
            if self._outer_in_backward:
                self._finish_outer(unit.trainable_groups)
        for unit in sorted(units, key=lambda unit: -unit.ordinal):
            self._finish_outer(unit.trainable_groups)

    def _launch(
        self, groups: Sequence[ParamGroup], in_place: InPlace = MappingProxyType({})
    ) -> None:
        """Starts reducing the collected gradients of `groups`, in one launch for each domain.
        in_place: gradients that are not collected."""
        transient = [group for group in groups if group.grads.has_transient_bucket]
        if any(group.grads.is_kept for group in transient):
            self._make_room(transient)
        for group in groups:
            group.grads.load_from_host()
        reductions = []
        for group in groups:
            reduction = self._reduction_of(group)
            if group in in_place:
                reduction = replace(reduction, segments=in_place[group])
            reductions.append(reduction)
            grads = group.grads
            grads.fill_bucket()
            reduction.scale_segments()
            grads.main.allocate()
            if reduction.is_partial:
                grads.partial.allocate()  # type: ignore[union-attr]
                grads.reduced_to_partial()
            grads.advance(GradState.REDUCED)
            grads.has_more = False
        self.runtime.follow(REDUCE, COMPUTE)
        launch = functools.partial(self._communicate, reductions)
        finishes = [reduction.finish for reduction in reductions]
        self.runtime.launch(REDUCE, launch, *finishes)
        if transient:
            held = list(itertools.chain(*in_place.values()))
            self._in_flight.append(InFlight(transient, self.runtime.record(REDUCE), held))

    def _reduction_of(self, group: ParamGroup) -> Reduction:
        grads = group.grads
        is_partial = grads.takes_partial
        adds = grads.has_partial if is_partial else grads.state in REDUCED_STATES
        known = self._reductions.get((id(group), adds, is_partial))
        if known is None:
            known = Reduction(
                group,
                self._way(group, is_partial),
                segments=grads.bucket.segments(group.shards.full),
                results=grads.bucket.segments(group.shards.inner),
                adds=adds,
                is_partial=is_partial,
                in_slot=grads.slot.memory is not None,
            )
            self._reductions[id(group), adds, is_partial] = known
        return known

    def _finish_outer(self, groups: Sequence[ParamGroup]) -> None:
        """Starts the reduction over the outer axis of what has been reduced over the shard axis.

        Runs once a step: the outer axis is the slow network, and a sum cannot be taken back."""
        parts = []
        after: list[Callable[[], None]] = []
        for group in groups:
            grads = group.grads
            how = self.outer.get(group.key.domain)
            if how is None or grads.state is not GradState.REDUCED or grads.is_withheld:
                continue
            segments, results = grads.inner_segments, grads.held_segments
            if grads.has_partial:
                segments = grads.partial.segments(group.shards.inner)  # type: ignore[union-attr]
                results = segments
            part = Reduction(group, how, segments, results)
            parts.append(part)
            grads.advance(GradState.FINISHED)
            if grads.reduced_hook is not None:
                after.append(part.run_hook)
            if grads.has_partial:
                scale = self._way(group).after_outer(group.config.policy.comm_dtype)
                after.append(functools.partial(part.add_partial, scale, grads.has_earlier))
                grads.partial_finished()
                self._partial.append(group)
        if parts:
            launch = functools.partial(self._communicate, parts)
            self.runtime.submit(REDUCE, launch, *after)

    def _communicate(self, reductions: Sequence[Reduction]) -> list[Any]:
        """Launches reductions over one axis."""
        works = []
        for mine in largest_domain_first(reductions):
            how = mine[0].reduce
            self.log.note(how.kind, [one.group for one in mine], how.communicator)
            works += how.way.launch(how.communicator, mine)
        return works

    def _make_room(self, groups: Sequence[ParamGroup]) -> None:
        """Frees the oldest buckets until one more may exist and none of `groups` is in flight.

        A model of one unit fills the very bucket that its last microbatch is still reducing. Groups
        in one slot share a bucket's memory."""
        while len(self._in_flight) >= MAX_BUCKETS:
            self._retire()
        while any(flight.uses_memory_of(groups) for flight in self._in_flight):
            self._retire()

    def _retire(self) -> None:
        """Frees the buckets of the oldest reduction, behind that reduction alone."""
        oldest = self._in_flight.popleft()
        self.runtime.wait(COMPUTE, oldest.event)
        for group in oldest.groups:
            group.grads.release_bucket()

    def retire_all(self) -> None:
        """Frees all buckets, behind their reductions.

        Called in the middle of a forward pass: the reductions of the microbatch before have long
        passed there, and memory is scarcest at its end."""
        while self._in_flight:
            self._retire()

    def finish(self) -> None:
        """Orders the compute stream behind every reduction and frees all buckets."""
        self.retire_all()
        self.runtime.follow(COMPUTE, REDUCE)
        for group in self._partial:
            group.grads.release_partial()
        self._partial.clear()
