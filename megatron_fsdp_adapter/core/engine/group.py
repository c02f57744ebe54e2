"""One group of parameters: its layout and its buffers.

                 no_shard       optim            optim_grads      optim_grads_params
    weights      full, kept     full, kept       full, kept       full, while gathered
    main         full           shard            shard            shard
    grad         full, kept     full, kept       shard, released  shard, released
    bucket       is grad *      is grad *        full, transient  full, transient

`weights` are the planes of the group's format: one in the compute dtype, which holds the raw
parameters, or those that the fields of quantized parameters are in. `main` is what the optimizer
updates; where its dtype is the weights' and the weights are kept, it *is* this rank's slice of
them. Scales of quantized weights are made when main weights have changed. So are their bytes, where
they are kept; optim_grads_params casts the bytes of trained ones at every gather.

Backward writes gradients into `collected`: the bucket where gradients are sharded, else the kept
gradients. The reduction moves the bucket to `grad`, and the optimizer reads this rank's rows of
that. `grad` is in the main-gradient dtype. `bucket` is in the communication dtype, or in that of
the gradients where the sums are the same (`buffer.bucket_dtype`).

* A full, transient copy where the two dtypes differ: made for the reduction, freed after it.

In a domain of one rank (`EngineConfig.whole`) both optim_grads and optim_grads_params do as optim
does, but their gradients are released.

Where the optimizer is offloaded `main` is in host memory, and optim_grads_params keeps its shard of
compute weights. The optimizer's update writes that shard too, while main weights are on the device
(`ShardedBuffer.load`).

With an outer axis that splits shards again, "shard" in the row of `main` is a part of the shard in
other rows. optim_grads_params keeps its shard of compute weights, in any format, between steps.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import torch
from torch import nn

from megatron_fsdp_adapter.core.comm.communicator import Pair
from megatron_fsdp_adapter.core.config import EngineConfig
from megatron_fsdp_adapter.core.layout.format import Plane
from megatron_fsdp_adapter.core.layout.group import GroupLayout, ShardSpec
from megatron_fsdp_adapter.core.layout.planner import plan_group
from megatron_fsdp_adapter.core.layout.ranges import nested_shard_rank
from megatron_fsdp_adapter.core.runtime.device import Runtime
from megatron_fsdp_adapter.core.topology import ShardDomain

from .buffer import WHOLE, ShardedBuffer, Slot, bucket_dtype, copies_to, copy_each
from .partition import GroupKey, ManagedParam, UnitPlan, unchecked
from .quantized import QuantizedWeights
from .wgrad import FusedWgrad


class GradState(enum.Enum):
    """The progress of a step's gradients. FINISHED only where there is an outer axis."""

    EMPTY = "empty"  # none yet
    ACCUMULATED = "accumulated"  # summed on this rank
    REDUCED = "reduced"  # over the shard axis
    FINISHED = "finished"  # over the outer axis as well


class ParamGroup:
    """The parameters of one unit that share domain, dtype and `requires_grad`.

    Construction moves the parameters' values into the group's buffers and makes each raw
    parameter's `.data`, or the fields of a quantized one, a view of them for life. Afterwards the
    weights are present (the caller releases them).

    Args:
        slots: where gathered weights and the bucket are in fixed memory.
        quantized: library of quantized weights, where the format is a quantized one.
        values: by parameter, the first main weights; a parameter without begins with its weights.
    """

    def __init__(
        self,
        name: str,
        key: GroupKey,
        managed: list[ManagedParam],
        layout: GroupLayout,
        domain: ShardDomain,
        config: EngineConfig,
        runtime: Runtime,
        slots: tuple[Slot, Slot],
        quantized: QuantizedWeights | None = None,
        values: Mapping[nn.Parameter, torch.Tensor] = MappingProxyType({}),
    ) -> None:
        self.name = name  # "unit/domain"
        self.key = key  # what its parameters share
        self.domain = domain  # the ranks that it is sharded over
        self.config = config  # of the unit's groups in this domain
        self.runtime = runtime  # streams and storage
        self.weight_slot, self.bucket_slot = slots  # fixed memory of both, or none
        self.managed = managed  # names and places of `params`
        self.layout = layout  # offsets of `params` in the flat buffer
        self.params = [entry.param for entry in managed]  # unsharded ones, in layout order
        # Whether this rank's shard of the main weights is split again over the outer axis.
        self.splits_outer = splits_outer(domain, config)
        # Whether the shard axis has one rank.
        self.is_single_rank = key.domain in config.whole
        self._decide()
        self._set_parts()  # behind `_decide`
        # Where the step's gradients are.
        self.grad_state = GradState.EMPTY
        # Whether the user has frozen all of `params`, for all forwards in flight. Their backward
        # then collects and reduces nothing.
        self.idle = False
        # Whether `held_weights` equal the main weights in host memory.
        self.own_current = True
        # Whether an update may still read the gradients of a step that has returned.
        self.is_read = False
        # Whether gradients were forgotten while an update may read them. They keep their memory
        # until it has (`grads_were_read`).
        self._release_waits = False
        # Indices of all parameters.
        self._all = frozenset(range(len(managed)))
        # Indices of the parameters that got a gradient since gradients were last forgotten. For the
        # others there are zeros in the buffers.
        self.given = frozenset[int]()
        # Writes this rank's part of quantized planes that are not kept.
        self.write_planes: Callable[..., None] | None = None
        # Changes in place what comes out of the reduction over the last axis, a mean over ranks.
        self.reduced_hook: Callable[[torch.Tensor], None] | None = None
        with torch.no_grad():
            self._build_weights(quantized)
            self._build_main(values)
            if key.requires_grad:
                self._build_grads()

    def _set_parts(self) -> None:
        """Sets the shards of the layout. All views of the group's buffers are looked up by these
        objects (`ShardedBuffer.segments`, `items`).

        The part of an outer rank lies inside its shard of the inner axis (`nested_shard_rank`), so
        that the two axes are gathered and reduced one after the other, in place."""
        layout = self.layout
        size = self.domain.axis.size if self.shards_main else 1
        # All of it.
        self.full = ShardSpec(layout.with_shards(1), 0)
        # That of this rank on the shard axis.
        self.inner = self.full
        if self.shards_main:
            self.inner = ShardSpec(layout.with_shards(size), self.domain.axis.rank)
        # The part of `inner` that this rank's optimizer updates.
        self.held = self.inner
        if self.splits_outer:
            rank = shard_rank(self.domain, self.config)
            self.held = ShardSpec(layout.with_shards(size * self.domain.outer_size), rank)

    def _decide(self) -> None:
        """Sets the fields that follow from strategy, dtypes and domain."""
        key = self.key
        strategy = self.config.strategy
        # Whether backward adds to the main gradients, which are reduced once a step.
        self.keeps_grads = not strategy.shard_grads
        # Whether compute weights stay while the unit does not compute.
        self.keeps_weights = not strategy.shard_weights
        # Whether this rank has a shard of the main weights, over the shard axis.
        self.shards_main = strategy.shard_main
        # Frozen parameters have no optimizer: their main weights stay in their own dtype.
        chosen = self.config.policy.main_params_dtype if key.requires_grad else None
        self.main_dtype = chosen or key.own_dtype  # of the main weights
        casts = self.main_dtype != key.dtype
        plain = key.quantized is None
        # Whether main weights are a slice of the kept compute weights.
        self.main_is_weight = plain and not casts and self.keeps_weights
        # Whether they are in host memory: not if they are the compute weights, or if quantized
        # weights are made of them on the device.
        self.main_on_host = self.config.offload and key.requires_grad and plain and casts

    def offloaded(self, dtype: torch.dtype) -> ShardedBuffer:
        """A released buffer, with `host` memory for its values, of as many elements as `held`. The
        values are zero."""
        held = self.held
        memory = self.runtime.host_memory(held.layout.shard_numel * dtype.itemsize)
        made = self._buffer(held, dtype)
        made.host = ShardedBuffer(held, [held], self.runtime, dtype, memory=memory, is_zero=True)
        made.release()
        return made

    def _build_weights(self, quantized: QuantizedWeights | None) -> None:
        stays = self.key.format.keeps_shards(self.key.requires_grad)
        wanted = self.splits_outer or self.main_on_host or stays
        # Whether a shard is kept, where weights are sharded. It is with an outer axis: this is the
        # slow network, and is gathered once a step then and not at every use. Keeping shards always
        # was tried: a gather then copies this rank's own piece, which costs what the cast does
        # (docs/results_experiments.md).
        self.keeps_shard = wanted and not self.keeps_weights
        # For each plane of the format, the buffer that modules compute with.
        self.weights: list[ShardedBuffer] = []
        for plane in self.key.format.planes:
            memory = self.weight_slot.take(plane.nbytes(self.layout.total_numel))
            self.weights.append(self._buffer(self.full, plane=plane, memory=memory))
        # Likewise the one that has this rank's part: the same, unless a shard is kept beside it.
        self.weight_shards = self.weights
        if self.keeps_shard:
            self.weight_shards = [self._buffer(self.inner, plane=one.plane) for one in self.weights]
        self._move_params(quantized)
        # Output and input of the gather over each axis, of all planes; empty where nothing is
        # sharded over it.
        self.gather_pairs: list[Pair] = []
        self.outer_pairs: list[Pair] = []  # likewise
        for full, shard in zip(self.weights, self.weight_shards, strict=True):
            inner = shard.segments(self.inner)
            if self.keeps_shard:
                copy_each(inner, full.segments(self.inner))
            if self.shards_main and not self.is_single_rank:
                self.gather_pairs += zip(full.segments(self.full), inner, strict=True)
            if self.splits_outer:
                self.outer_pairs += zip(inner, shard.segments(self.held), strict=True)
        # `held` of each segment of the weights that main weights are cast to.
        self.held_weights = [] if quantized else self.weight_shards[0].segments(self.held)
        self._write_held = copies_to(self.held_weights)  # casts main weights to them

    def _move_params(self, quantized: QuantizedWeights | None) -> None:
        for index, param in enumerate(self.params):
            views = {full.plane.name: full.params[index] for full in self.weights}
            if quantized is None:
                (view,) = views.values()
                view.copy_(param.data)
                param.data = view
            else:
                quantized.move(param, views)

    def _buffer(
        self,
        stored: ShardSpec,
        dtype: torch.dtype | None = None,
        plane: Plane = WHOLE,
        memory: torch.Tensor | None = None,
    ) -> ShardedBuffer:
        specs = (self.full, self.inner, self.held)
        inside = specs[specs.index(stored) :]  # each shard is inside of the one before it
        return ShardedBuffer(stored, inside, self.runtime, dtype, plane, memory)

    def _build_main(self, values: Mapping[nn.Parameter, torch.Tensor]) -> None:
        # The buffer that the optimizer updates.
        if self.main_is_weight:
            self.device_main = self.weights[0]
        elif self.main_on_host:
            self.device_main = self.offloaded(self.main_dtype)
        else:
            self.device_main = self._buffer(self.held, self.main_dtype)
        # The main weights, in host memory or not.
        self.main = self.device_main.host or self.device_main
        self._main_segments = self.main.segments(self.held)  # what `_write_held` casts
        if not self.main_is_weight and self.held_weights:
            copy_each(self._main_segments, self.held_weights)
        for index, param in enumerate(self.params):
            if param in values:
                part = self.held.range(index)
                rows = self.main.items(self.held)[index]
                given = values[param].reshape(-1)[part.start : part.stop]
                rows.copy_(given.view(rows.shape))

    def _build_grads(self) -> None:
        policy = self.config.policy
        # The main gradients, valid between reduction and zeroing.
        self.grad = self._buffer(self.full if self.keeps_grads else self.inner, policy.grads_dtype)
        # The buffer that is communicated. A reduction that does not end in the main gradients
        # leaves its result in the `inner` shard of it.
        self.bucket = self.grad
        if not self.keeps_grads or policy.comm_dtype != policy.grads_dtype:
            dtype = bucket_dtype(self.layout, policy.comm_dtype, self.config.narrows_buckets)
            memory = self.bucket_slot.take(self.layout.total_numel * dtype.itemsize)
            self.bucket = self._buffer(self.full, dtype, memory=memory)
        # Whether the bucket is a buffer of its own, which comes and goes.
        self.has_transient_bucket = self.bucket is not self.grad
        # The buffer that backward's gradients are written to.
        self.collected = self.grad if self.keeps_grads else self.bucket
        writers = [entry.writer for entry in self.managed]
        # The gradients that modules write by themselves.
        self.direct = FusedWgrad(self.params, writers, self.collected.params, self.name)
        # What a reduction over the shard axis writes of the main gradients.
        self.grad_segments = self.grad.segments(self.inner)
        # What the optimizer reads of them.
        self.held_grads = self.grad.segments(self.held)
        # What lies between the parameters in `collected`.
        self.bucket_gaps = self.collected.views(self.layout.gaps())
        # Copies the gradients of all parameters there.
        self._collect = copies_to(self.collected.params)
        self._release_grads()

    @property
    def can_keep_grads(self) -> bool:
        """True if gradients of several microbatches may be summed in the bucket: gradients are
        collected there, no other unit uses its memory, and it has the main gradients' dtype."""
        collects_in_bucket = self.has_transient_bucket and self.collected is self.bucket
        if not collects_in_bucket or self.bucket_slot.memory is not None:
            return False
        return self.bucket.tensor.dtype == self.grad.tensor.dtype

    def fill_bucket(self) -> None:
        """Copies gradients into the bucket, if backward has written them elsewhere."""
        if self.bucket is not self.collected:
            self.bucket.allocate()
            copy_each(self.bucket.segments(self.full), self.collected.segments(self.full))

    def release_bucket(self) -> None:
        """Releases the bucket, if only a reduction needs it."""
        if self.has_transient_bucket:
            self.bucket.release()

    def _release_grads(self) -> None:
        # Gradients that an update may read wait for `grads_were_read`.
        self.release_bucket()
        self._release_waits = self.is_read
        if self.is_read:
            return
        if self.is_single_rank or self.collected is not self.grad:
            self.grad.release()
        else:
            self.grad.forget()

    def grads_were_read(self) -> None:
        """Ends the reading of gradients by an update, which the compute stream is behind now."""
        self.is_read = False
        if self._release_waits:
            self._release_grads()

    def write_own_weights(self) -> None:
        """Casts the main weights into this rank's part of the compute weights.

        Quantized weights are written by `write_planes`, if they are not kept. Main weights in host
        memory are cast only if they have changed (`own_current`)."""
        if self.write_planes is not None:
            self.write_planes()
        if self.main_is_weight or not self.held_weights:
            return
        if not (self.main_on_host and self.own_current):
            self._write_held(self._main_segments)
        self.own_current = True

    def write_own_from_device(self) -> None:
        """Casts main weights that are in host memory, from the device buffer in which an optimizer
        has just updated them."""
        if self.main_on_host:
            copy_each(self.held_weights, self.device_main.segments(self.held))
            self.own_current = True

    def has_grads(self) -> bool:
        """True if backward has left a gradient that `take_grads` has not taken."""
        with unchecked():
            return self.direct.is_open or any(param.grad is not None for param in self.params)

    def collect_late(self) -> ShardedBuffer:
        """Moves the unsharded parameters' `.grad` into a new buffer and returns that. It has the
        bucket's dtype, and is zero where there is no gradient."""
        late = self._buffer(self.full, self.bucket.tensor.dtype)
        grads = self.take_unsharded_grads()
        found = [index for index, grad in enumerate(grads) if grad is not None]
        self.given |= set(found)
        views = [late.params[index] for index in found]
        copy_each(views, [grads[index] for index in found])  # type: ignore[misc]
        return late

    def take_grads(self, accumulate: bool) -> None:
        """Moves the unsharded parameters' `.grad` into `collected`.

        A `.grad` is added to what its module has written there by itself, and with `accumulate` to
        all that is there. Otherwise it replaces what is there, and a parameter without a gradient
        gets zeros.
        """
        every = self.take_unsharded_grads()
        written = self.direct.close() if self.direct.is_open else set()
        if not accumulate and not written and all(grad is not None for grad in every):
            self.given = self._all
            self._collect(every)  # type: ignore[arg-type]
            if self.bucket_gaps:
                torch._foreach_zero_(self.bucket_gaps)
            return
        self.given |= written
        self.given |= {index for index, grad in enumerate(every) if grad is not None}
        kept = range(len(every)) if accumulate else written
        self.put_grads(enumerate(every), kept)
        zeroed = [] if accumulate else list(self.bucket_gaps)
        for index, view in enumerate(self.collected.params):
            if every[index] is None and index not in kept:
                zeroed.append(view)
        if zeroed:
            torch._foreach_zero_(zeroed)

    def put_grads(
        self, grads: Iterable[tuple[int, torch.Tensor | None]], kept: Container[int]
    ) -> None:
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

    def take_unsharded_grads(self) -> list[torch.Tensor | None]:
        """Takes `.grad` off the unsharded parameters and returns them."""
        with unchecked():
            grads = [param.grad for param in self.params]
            for param in self.params:
                param.grad = None
        return grads

    def drop_grads(self, collected: bool = True) -> None:
        """Forgets the step's gradients, whatever state they are in. collected: also `.grad` of the
        unsharded parameters."""
        if collected:
            self.take_unsharded_grads()
        self.grad_state = GradState.EMPTY
        self.given = frozenset()
        if self.key.requires_grad:
            self.direct.close()
            self.direct.expect(True)
            self._release_grads()


def splits_outer(domain: ShardDomain, config: EngineConfig) -> bool:
    """True if shards of main weights are split again over the outer axis."""
    return config.shard_outer and domain.outer is not None


def shard_rank(domain: ShardDomain, config: EngineConfig) -> int:
    """The number of this rank's shard of main weights, over all axes."""
    inner = domain.axis.rank if config.strategy.shard_main else 0
    outer = domain.outer
    if outer is None or not splits_outer(domain, config):
        return inner
    return nested_shard_rank(inner, outer.rank, outer.size)


def laid_out(
    plans: Sequence[UnitPlan], domains: Mapping[str, ShardDomain], config: EngineConfig
) -> list[UnitPlan]:
    """`plans` with the layouts of their groups over all shards of main weights. A group keeps the
    layout that it has, if that is of the same parameters."""

    def layout(plan: UnitPlan, key: GroupKey) -> GroupLayout:
        specs = tuple(entry.spec(index, key) for index, entry in enumerate(plan.groups[key]))
        known = plan.layouts.get(key)
        if known is not None and known.specs == specs:
            return known
        domain = domains[key.domain]
        shards = domain.axis.size
        if splits_outer(domain, config):
            shards *= domain.outer_size
        return plan_group(specs, shards)

    found = []
    for plan in plans:
        layouts = {key: layout(plan, key) for key in plan.groups}
        found.append(replace(plan, layouts=layouts))
    return found


def by_domain(groups: Sequence[ParamGroup]) -> dict[str, list[ParamGroup]]:
    """The groups of each domain, in their order."""
    found: dict[str, list[ParamGroup]] = {}
    for group in groups:
        found.setdefault(group.key.domain, []).append(group)
    return found
