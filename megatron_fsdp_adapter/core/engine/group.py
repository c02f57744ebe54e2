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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import torch
from torch import nn

from megatron_fsdp_adapter.core.comm.communicator import Pair
from megatron_fsdp_adapter.core.config import EngineConfig
from megatron_fsdp_adapter.core.layout.group import GroupLayout, ShardSpec
from megatron_fsdp_adapter.core.layout.planner import plan_group
from megatron_fsdp_adapter.core.layout.ranges import nested_shard_rank
from megatron_fsdp_adapter.core.runtime.device import Runtime
from megatron_fsdp_adapter.core.topology import ShardDomain

from .buffer import GroupShards, ShardedBuffer, Slot, copies_to, copy_each
from .grad_buffers import GradBuffers
from .partition import GroupKey, ManagedParam, UnitPlan
from .quantized import QuantizedWeights


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
        self.weight_slot = slots[0]  # fixed memory of gathered weights, or none
        self.managed = managed  # names and places of `params`
        self.layout = layout  # offsets of `params` in the flat buffer
        self.params = [entry.param for entry in managed]  # unsharded ones, in layout order
        # Whether the shard axis has one rank.
        self.is_single_rank = key.domain in config.whole
        self._decide()
        # Those of the layout, and buffers over them.
        self.shards = group_shards(layout, domain, config, runtime)
        # Whether `held_weights` equal the main weights in host memory.
        self.own_current = True
        # Writes this rank's part of quantized planes that are not kept.
        self.write_planes: Callable[..., None] | None = None
        with torch.no_grad():
            self._build_weights(quantized)
            self._build_main(values)
            if key.requires_grad:
                # Of a group that is not frozen for good: its gradients.
                self.grads = GradBuffers(
                    name,
                    managed,
                    self.shards,
                    config,
                    slots[1],
                    one_rank=self.is_single_rank,
                    outer=domain.outer is not None,
                )

    def _decide(self) -> None:
        """Sets the fields that follow from strategy, dtypes and domain."""
        key = self.key
        strategy = self.config.strategy
        # Whether compute weights stay while the unit does not compute.
        self.keeps_weights = not strategy.shard_weights
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

    def _build_weights(self, quantized: QuantizedWeights | None) -> None:
        stays = self.key.format.keeps_shards(self.key.requires_grad)
        wanted = self.shards.splits_outer or self.main_on_host or stays
        # Whether a shard is kept, where weights are sharded. It is with an outer axis: this is the
        # slow network, and is gathered once a step then and not at every use. Keeping shards always
        # was tried: a gather then copies this rank's own piece, which costs what the cast does
        # (docs/results_experiments.md).
        self.keeps_shard = wanted and not self.keeps_weights
        # For each plane of the format, the buffer that modules compute with.
        self.weights: list[ShardedBuffer] = []
        for plane in self.key.format.planes:
            memory = self.weight_slot.take(plane.nbytes(self.layout.total_numel))
            self.weights.append(self.shards.buffer(self.shards.full, plane=plane, memory=memory))
        # Likewise the one that has this rank's part: the same, unless a shard is kept beside it.
        self.weight_shards = self.weights
        if self.keeps_shard:
            self.weight_shards = [
                self.shards.buffer(self.shards.inner, plane=one.plane) for one in self.weights
            ]
        self._move_params(quantized)
        # Output and input of the gather over each axis, of all planes; empty where nothing is
        # sharded over it.
        self.gather_pairs: list[Pair] = []
        self.outer_pairs: list[Pair] = []  # likewise
        for full, shard in zip(self.weights, self.weight_shards, strict=True):
            inner = shard.segments(self.shards.inner)
            if self.keeps_shard:
                copy_each(inner, full.segments(self.shards.inner))
            if self.shards.splits_axis and not self.is_single_rank:
                self.gather_pairs += zip(full.segments(self.shards.full), inner, strict=True)
            if self.shards.splits_outer:
                self.outer_pairs += zip(inner, shard.segments(self.shards.held), strict=True)
        # `held` of each segment of the weights that main weights are cast to.
        self.held_weights = [] if quantized else self.weight_shards[0].segments(self.shards.held)
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

    def _build_main(self, values: Mapping[nn.Parameter, torch.Tensor]) -> None:
        # The buffer that the optimizer updates.
        if self.main_is_weight:
            self.device_main = self.weights[0]
        elif self.main_on_host:
            self.device_main = self.shards.offloaded(self.main_dtype)
        else:
            self.device_main = self.shards.buffer(self.shards.held, self.main_dtype)
        # The main weights, in host memory or not.
        self.main = self.device_main.host or self.device_main
        self._main_segments = self.main.segments(self.shards.held)  # what `_write_held` casts
        if not self.main_is_weight and self.held_weights:
            copy_each(self._main_segments, self.held_weights)
        for index, param in enumerate(self.params):
            if param in values:
                part = self.shards.held.range(index)
                rows = self.main.items(self.shards.held)[index]
                given = values[param].reshape(-1)[part.start : part.stop]
                rows.copy_(given.view(rows.shape))

    def cast_planes_by(self, write: Callable[..., None]) -> None:
        """Sets the function that each gather calls to write planes that are not kept."""
        self.write_planes = write

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
            copy_each(self.held_weights, self.device_main.segments(self.shards.held))
            self.own_current = True


def group_shards(
    layout: GroupLayout, domain: ShardDomain, config: EngineConfig, runtime: Runtime
) -> GroupShards:
    """The shards of `layout` that this rank has, and buffers over them.

    The part of an outer rank lies inside its shard of the inner axis (`nested_shard_rank`), so that
    the two axes are gathered and reduced one after the other, in place."""
    full = ShardSpec(layout.with_shards(1), 0)
    inner = full
    size = 1
    if config.strategy.shard_main:
        size = domain.axis.size
        inner = ShardSpec(layout.with_shards(size), domain.axis.rank)
    held = inner
    if splits_outer(domain, config):
        rank = shard_rank(domain, config)
        held = ShardSpec(layout.with_shards(size * domain.outer_size), rank)
    return GroupShards(runtime, full, inner, held)


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
