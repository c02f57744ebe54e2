"""Gradients of one group: their buffers, and their progress in a step.

Backward writes gradients into `collected`: the bucket where gradients are sharded, else the main
gradients, which are kept. The reduction moves the bucket to `main`, of which the optimizer reads
this rank's rows. `main` is in the main-gradient dtype. `bucket` is in the communication dtype, or
in that of the gradients where the sums are the same (`buffer.bucket_dtype`).

Where gradients are kept and the two dtypes differ, the bucket is a copy in full size: made for the
reduction, and freed after it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Iterable, Sequence

import torch

from megatron_fsdp_adapter.core.config import FURTHER_DTYPES, EngineConfig

from .buffer import GroupShards, ShardedBuffer, Slot, bucket_dtype, copies_to, copy_each
from .grad_states import REDUCED_STATES, GradState, legal_transitions
from .partition import ManagedParam, unchecked
from .tensor_parallel import forget_partial
from .wgrad import FusedWgrad


class GradBuffers:
    """The gradients of one trained group.

    Args:
        name: names the group in errors.
        managed: its parameters, in layout order.
        shards: of its layout.
        config: of the group.
        slot: where the bucket is in fixed memory.
        one_rank, outer: as of `grad_states.legal_transitions`.
    """

    def __init__(
        self,
        name: str,
        managed: Sequence[ManagedParam],
        shards: GroupShards,
        config: EngineConfig,
        slot: Slot,
        one_rank: bool,
        outer: bool,
    ) -> None:
        self.name = name  # of the group
        self.shards = shards  # of the group's layout
        self.slot = slot  # fixed memory of the bucket, or none
        self._managed = managed  # names and places of the parameters
        self._params = [entry.param for entry in managed]  # unsharded ones, in layout order
        # The progress in this step; that of the main gradients, if there are sums beside them.
        self.state = GradState.EMPTY
        # Whether the bucket has sums of this rank that come after gradients that were reduced.
        self.has_more = False
        # Whether `partial` has sums over the shard axis, and whether they come after gradients that
        # are finished, in the main gradients.
        self.has_partial = False
        self.has_earlier = False  # see above
        # Whether main gradients are released when they are forgotten.
        self._releases_main = one_rank or config.strategy.shard_grads
        # Whether backward adds up microbatches in `collected`, which is then reduced once a step.
        self.is_kept = not config.strategy.shard_grads
        self._has_outer = outer  # whether there is an outer axis
        # Whether gradients may be reduced where autograd has left them: parts of others lie in
        # segments together, and exchanges of slots need both ends there.
        self.may_stay = config.even_rows and slot.memory is None
        # Whether the reduction over that is left out, so that gradients are not attached.
        self.is_withheld = False
        # Whether the user has frozen all parameters, for all forwards in flight. Their backward
        # then collects and reduces nothing.
        self.is_idle = False
        # Whether an update may still read the gradients of a step that has returned.
        self._is_read = False
        # Whether gradients were forgotten while an update may read them. They keep their memory
        # until it has (`were_read`).
        self._release_waits = False
        # Indices of all parameters.
        self._all = frozenset(range(len(managed)))
        # Indices of the parameters that got a gradient since gradients were last forgotten, or
        # attached to sharded parameters.
        self.given = frozenset[int]()
        # Changes in place what comes out of the reduction over the last axis, a mean over ranks.
        self.reduced_hook: Callable[[torch.Tensor], None] | None = None
        self._build(managed, config, outer)
        # Whether the bucket can keep sums beside reduced gradients, as under torch's FSDP2.
        self.keeps_beside = config.policy.as_fsdp2 and self._collects_in_bucket
        # Transitions that are legal (`advance`).
        self._transitions = legal_transitions(
            one_rank, outer, shards.splits_outer, self.keeps_beside
        )

    def _build(self, managed: Sequence[ManagedParam], config: EngineConfig, outer: bool) -> None:
        shards = self.shards
        layout = shards.full.layout
        policy = config.policy
        # The main gradients, valid between reduction and zeroing.
        self.main = shards.buffer(shards.full if self.is_kept else shards.inner, policy.grads_dtype)
        # Copies of them in host memory, which the optimizer reads; None if it reads these.
        self.host = shards.in_host_memory(policy.grads_dtype) if config.host_rows else None
        # Whether they are there alone.
        self.is_on_host = False
        # The buffer that is communicated. A reduction that does not end in the main gradients
        # leaves its result in the `inner` shard of it.
        self.bucket = self.main
        if not self.is_kept or policy.comm_dtype != policy.grads_dtype:
            dtype = bucket_dtype(layout, policy.comm_dtype, config.narrows_buckets)
            memory = self.slot.take(layout.total_numel * dtype.itemsize)
            self.bucket = shards.buffer(shards.full, dtype, memory=memory)
        # Sums over the shard axis that are to be reduced over the outer axis, before torch's FSDP2
        # adds them to gradients, or casts them.
        self.partial: ShardedBuffer | None = None
        if policy.as_fsdp2 and outer and not shards.splits_outer and not self.is_kept:
            self.partial = shards.buffer(shards.inner, policy.sum_dtype)
        # The buffer that backward's gradients are written to.
        self.collected = self.main if self.is_kept else self.bucket
        writers = [entry.writer for entry in managed]
        # The gradients that modules write by themselves.
        self.direct = FusedWgrad(self._params, writers, self.collected.params, self.name)
        # What a reduction over the shard axis writes of the main gradients.
        self.inner_segments = self.main.segments(shards.inner)
        # What the optimizer reads of them.
        self.held_segments = self.main.segments(shards.held)
        # What lies between the parameters in `collected`.
        self._gaps = self.collected.views(layout.gaps())
        # Copies the gradients of all parameters there.
        self._collect = copies_to(self.collected.params)
        self._release()

    # Their progress.

    def advance(self, state: GradState) -> None:
        """Moves to `state`. Raises RuntimeError if that is not a legal transition."""
        if (self.state, state) not in self._transitions:
            raise RuntimeError(
                f"gradients of {self.name}: {self.state.name} -> {state.name} is not a legal "
                "transition"
            )
        self.state = state

    def freeze(self, frozen: bool, between_passes: bool) -> None:
        """Notes whether the user has frozen all parameters. Gradients become idle between two
        passes only: a forward that was run before waits for its backward."""
        self.is_idle = frozen and (self.is_idle or between_passes)

    def change_reduced_by(self, hook: Callable[[torch.Tensor], None]) -> None:
        """Sets the hook that changes reduced gradients in place."""
        self.reduced_hook = hook

    @functools.cached_property
    def has_transient_bucket(self) -> bool:
        """True if the bucket is a buffer of its own, which comes and goes."""
        return self.bucket is not self.main

    @property
    def _collects_in_bucket(self) -> bool:
        """True if gradients are collected in a bucket whose memory no other unit uses."""
        in_bucket = self.has_transient_bucket and self.collected is self.bucket
        return in_bucket and self.slot.memory is None

    @property
    def can_be_kept(self) -> bool:
        """True if gradients of several microbatches may be summed in the bucket: no other unit uses
        its memory, and it has the main gradients' dtype, or rounds as torch's FSDP2 does."""
        if self.keeps_beside:
            return True
        return self._collects_in_bucket and self.bucket.tensor.dtype == self.main.tensor.dtype

    @property
    def keeps_sums(self) -> bool:
        """True if sums are kept in the bucket, and not in the main gradients."""
        return self.keeps_beside and self.is_kept

    def withhold(self, withheld: bool) -> None:
        """Leaves out the reduction over the outer axis, or no longer. What it has reduced is
        attached, so what is added to that is reduced, too, unless there is `partial`."""
        can = self._has_outer and (self.partial is not None or self.state is not GradState.FINISHED)
        self.is_withheld = withheld and can

    @property
    def are_whole(self) -> bool:
        """True if none of them waits for a reduction of a later backward, over any axis."""
        return not (self.is_summed or self.is_withheld)

    @property
    def is_summed(self) -> bool:
        """True if there are sums of this rank that are not reduced."""
        return self.has_more or self.state is GradState.ACCUMULATED

    def were_summed(self) -> None:
        """Notes that a backward's gradients were added to what this rank keeps."""
        if self.keeps_beside and self.state in REDUCED_STATES:
            self.has_more = True
        else:
            self.advance(GradState.ACCUMULATED)

    @functools.cached_property
    def has_own_dtype(self) -> bool:
        """True if gradients are collected in the dtype in which autograd leaves them."""
        return all(param.dtype == self.collected.tensor.dtype for param in self._params)

    @property
    def takes_partial(self) -> bool:
        """True if the next reduction over the shard axis is to give sums in `partial`."""
        if self.partial is None:
            return False
        dtype = self.partial.dtype
        is_cast = dtype != self.main.dtype or dtype in FURTHER_DTYPES
        return is_cast or self.has_partial or self.state is GradState.FINISHED

    def reduced_to_partial(self) -> None:
        """Notes that sums over the shard axis are in `partial`."""
        self.has_earlier |= self.state is GradState.FINISHED
        self.has_partial = True

    def partial_finished(self) -> None:
        """Notes that the sums of `partial` are in the main gradients."""
        self.has_partial = False
        self.has_earlier = False

    def keep(self, kept: bool) -> None:
        """Keeps gradients over microbatches from now on, or no longer, if `can_be_kept`."""
        if self.can_be_kept:
            self.is_kept = kept

    def write_by_graphs(self, written: bool, adds: bool) -> None:
        """Sets whether CUDA graphs write into `collected`, whose memory then stays between steps.
        adds: they add to what is kept from one microbatch to the next."""
        self.direct.write_by_graphs(written, adds and self.is_kept)
        if written:
            self.collected.keep_storage()
        else:
            self.collected.let_storage_go()

    # Memory.

    def fill_bucket(self) -> None:
        """Copies gradients into the bucket, if backward has written them elsewhere."""
        if self.bucket is not self.collected:
            full = self.shards.full
            self.bucket.allocate()
            copy_each(self.bucket.segments(full), self.collected.segments(full))

    def release_bucket(self) -> None:
        """Releases the bucket, if only a reduction needs it."""
        if self.has_transient_bucket:
            self.bucket.release()

    def _release(self) -> None:
        self.release_bucket()
        self.release_partial()
        self._release_main()

    def release_partial(self) -> None:
        """Releases `partial`, if it has no sums."""
        if self.partial is not None and not self.has_partial:
            self.partial.release()

    def _release_main(self) -> None:
        # Gradients that an update may read wait for `were_read`.
        self._release_waits = self._is_read
        if self._is_read:
            return
        if self._releases_main:
            self.main.release()
        else:
            self.main.forget()

    def read_by_update(self) -> None:
        """Notes that an update, which goes on behind the step, reads them until `were_read`."""
        self._is_read = True

    def were_read(self) -> None:
        """Ends the reading of gradients by an update, which the compute stream is behind now."""
        self._is_read = False
        if self._release_waits:
            self._release_main()

    def copy_to_host(self) -> None:
        """Copies them to host memory, on the current stream. `moved_to_host` follows."""
        held = self.shards.held
        for target, own in zip(self.host.items(held), self.main.items(held), strict=True):  # type: ignore[union-attr]
            target.copy_(own, non_blocking=True)

    def moved_to_host(self) -> None:
        """Notes that they are in host memory, and gives back that of the device."""
        self.is_on_host = True
        if self._releases_main:
            self.main.release()

    def load_from_host(self) -> None:
        """Brings them to the device, on the current stream, if they are in host memory."""
        if not self.is_on_host:
            return
        held = self.shards.held
        self.is_on_host = False
        self.main.allocate()
        for target, own in zip(self.main.items(held), self.host.items(held), strict=True):  # type: ignore[union-attr]
            target.copy_(own, non_blocking=True)

    # From `.grad` of the unsharded parameters.

    def has_untaken(self) -> bool:
        """True if backward has left a gradient that `take` has not taken."""
        with unchecked():
            return self.direct.is_open or any(param.grad is not None for param in self._params)

    def forget_sums(self) -> None:
        """Forgets what a backward has left, and sums that are beside reduced gradients."""
        self.take_off()
        with unchecked():
            forget_partial(self._managed)
        if self.has_earlier:
            self.advance(GradState.FINISHED)
        self.partial_finished()
        self.has_more = False
        self.release_bucket()
        self.release_partial()

    def take(self, accumulate: bool) -> None:
        """Moves the unsharded parameters' `.grad` into `collected`.

        A `.grad` is added to what its module has written there by itself, and with `accumulate` to
        all that is there. Otherwise it replaces what is there, and a parameter without a gradient
        gets zeros.
        """
        every = self.take_off()
        written = self.direct.close() if self.direct.is_open else set()
        if not accumulate and not written and all(grad is not None for grad in every):
            self.given = self._all
            self._collect(every)  # type: ignore[arg-type]
            if self._gaps:
                torch._foreach_zero_(self._gaps)
            return
        self.given |= written
        self.given |= {index for index, grad in enumerate(every) if grad is not None}
        kept = range(len(every)) if accumulate else written
        self.put(enumerate(every), kept)
        zeroed = [] if accumulate else list(self._gaps)
        for index, view in enumerate(self.collected.params):
            if every[index] is None and index not in kept:
                zeroed.append(view)
        if zeroed:
            torch._foreach_zero_(zeroed)

    def take_in_place(self) -> list[torch.Tensor] | None:
        """Takes the unsharded parameters' `.grad`, 1-D, to be reduced where autograd has left them.
        Takes none and returns None unless each is there, and is like its segment of the bucket."""
        if self.direct.is_open or not self._has_segment_each:
            return None
        segments = self.bucket.segments(self.shards.full)
        with unchecked():
            grads = [param.grad for param in self._params]
        found = []
        for grad, segment in zip(grads, segments, strict=True):
            if type(grad) is not torch.Tensor or not grad.is_contiguous():
                return None
            if grad.dtype != segment.dtype or grad.numel() != segment.numel():
                return None
            found.append(grad.view(-1))
        self.take_off()
        self.given = self._all
        return found

    @functools.cached_property
    def _has_segment_each(self) -> bool:
        """True if each parameter is a segment of its own, in layout order, without padding."""
        layout = self.shards.full.layout
        if len(layout.segments) != len(self._params):
            return False
        pairs = zip(layout.segments, layout.placements, self._params, strict=True)
        for number, (segment, placement, param) in enumerate(pairs):
            if placement.segment != number or placement.offset != segment.offset:
                return False
            if param.numel() != segment.numel:
                return False
        return True

    def take_late(self) -> ShardedBuffer:
        """Moves the unsharded parameters' `.grad` into a new buffer and returns that. It has the
        bucket's dtype, and is zero where there is no gradient."""
        late = self.shards.buffer(self.shards.full, self.bucket.tensor.dtype)
        grads = self.take_off()
        found = [index for index, grad in enumerate(grads) if grad is not None]
        self.given |= set(found)
        views = [late.params[index] for index in found]
        copy_each(views, [grads[index] for index in found])  # type: ignore[misc]
        return late

    def put(self, grads: Iterable[tuple[int, torch.Tensor | None]], kept: Container[int]) -> None:
        """Puts gradients, each with its parameter's index, into `collected`. Adds those of `kept`
        parameters to what is there, and copies the others over it. None is left out."""
        sums = []
        added = []
        replaced = []
        copied = []
        for index, grad in grads:
            if grad is None:
                continue
            view = self.collected.params[index]
            if index in kept:
                sums.append(view)
                added.append(grad)
            else:
                replaced.append(view)
                copied.append(grad)
        if added:
            torch._foreach_add_(sums, added)
        copy_each(replaced, copied)

    def take_off(self) -> list[torch.Tensor | None]:
        """Takes `.grad` off the unsharded parameters and returns them."""
        with unchecked():
            grads = [param.grad for param in self._params]
            for param in self._params:
                param.grad = None
        return grads

    # To nothing.

    def zero(self, indices: Sequence[int], collected: bool) -> None:
        """Sets the gradients of the parameters at `indices` to zero, in whichever buffer they are
        by now. collected: also forgets what a backward has left on the unsharded ones."""
        with unchecked():
            if collected:
                for index in indices:
                    self._params[index].grad = None
        if collected or not self.has_more:
            self.given -= {*indices}
        buffers = []
        if (self.has_more and collected) or self.state is GradState.ACCUMULATED:
            buffers.append(self.collected.params)
        if self.has_partial and collected:
            buffers.append(self.partial.items(self.shards.held))  # type: ignore[union-attr]
        if self.state in REDUCED_STATES and (self.has_earlier or not self.has_partial):
            there = self.host if self.is_on_host and self.host else self.main
            buffers.append(there.items(self.shards.held))
        for items in buffers:
            torch._foreach_zero_([items[index] for index in indices])

    def were_attached(self) -> None:
        """Notes that sharded parameters have the gradients of all backwards so far."""
        self.given = frozenset()

    def drop(self, collected: bool = True) -> None:
        """Forgets the step's gradients, whatever state they are in. collected: also `.grad` of the
        unsharded parameters, and sums beside reduced gradients."""
        self.is_on_host = False
        if self.has_partial and not collected:
            self.has_earlier = False
            return
        self.partial_finished()
        if self.has_more and not collected:
            self.has_more = False
            self.advance(GradState.ACCUMULATED)
            self._release_main()
            return
        self.has_more = False
        if collected:
            self.forget_sums()
        self.advance(GradState.EMPTY)
        self.given = frozenset()
        self.direct.close()
        self.direct.expect(True)
        self._release()
