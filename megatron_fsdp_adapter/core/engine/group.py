"""One group of parameters: its layout, and its buffers for weights, main weights and gradients.

                     no_shard       optim            optim_grads      optim_grads_params
    weights          full, kept     full, kept       full, kept       full, while gathered **
    main             full           shard            shard            shard
    grads.main       full, kept     full, kept       shard, released  shard, released
    grads.bucket     is main *      is main *        full, transient  full, transient

`weights` are the planes of the group's format: one in the compute dtype, which holds the raw
parameters, or those that the fields of quantized parameters are in. `main` is what the optimizer
updates.

* A full, transient copy where the dtypes of both differ (`grad_buffers.py`).
** Between uses a shard, where one is kept (`_wants_shards`: main weights on the host, a split outer
axis, some formats).

In a domain of one rank (`EngineConfig.whole`) both optim_grads and optim_grads_params do as optim
does, but their gradients are released.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from megatron_fsdp_adapter.core.config import EngineConfig
from megatron_fsdp_adapter.core.layout.group import GroupLayout, ShardSpec
from megatron_fsdp_adapter.core.layout.planner import plan_even, plan_group
from megatron_fsdp_adapter.core.layout.ranges import nested_shard_rank
from megatron_fsdp_adapter.core.runtime.device import Runtime
from megatron_fsdp_adapter.core.topology import ShardDomain

from .buffer import GroupShards, ShardedBuffer, Slot
from .extensions import ExtendedMainWeights, ExtendedParam, ExtendedWeights
from .grad_buffers import GradBuffers
from .partition import GroupKey, ManagedParam, UnitPlan
from .quantized import QuantizedWeights
from .rows_buffer import buffer_of_rows
from .weight_buffers import MainWeights, WeightBuffers


class ParamGroup:
    """The parameters of one unit that share domain, dtype, format and `requires_grad`.

    Construction moves the parameters' values into the group's buffers (`WeightBuffers`). Afterwards
    the weights are present (the caller releases them).

    Args:
        slots: where unsharded weights and the bucket are in fixed memory.
        quantized: library of quantized weights, where the format is a quantized one.
        values: by parameter, the first main weights; a parameter without begins with its weights.
    """

    grads: GradBuffers
    """Gradients; only of a group that is trained, or was (`begin_training`)."""

    @torch.no_grad()
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
        self.managed = managed  # names and places of `params`
        self.layout = layout  # offsets of `params` in the flat buffer
        self.params = [entry.param for entry in managed]  # unsharded ones, in layout order
        # Whether the shard axis has one rank.
        self.is_single_rank = key.domain in config.whole
        # The shards of the layout, and buffers over them.
        self.shards = group_shards(layout, domain, config, runtime)
        weight_slot, bucket_slot = slots
        if key.extended:
            self._build_extended(weight_slot, runtime)
        else:
            self._build_weights(weight_slot, quantized, values, rows_of_sharded(managed))
        # Changes reduced gradients in place; None if nothing does.
        self._reduced_hook: Callable[[torch.Tensor], None] | None = None
        if key.requires_grad:
            self._make_grads(bucket_slot)

    def _make_grads(self, slot: Slot) -> None:
        self.grads = GradBuffers(
            self.name,
            self.managed,
            self.shards,
            self.config,
            slot,
            one_rank=self.is_single_rank,
            outer=self.domain.has_replicas,
        )
        if self._reduced_hook is not None:
            self.grads.change_reduced_by(self._reduced_hook)

    def begin_training(self) -> None:
        """Makes the gradients of a group whose parameters were frozen until now. Their bucket comes
        and goes, as slots have no room for it."""
        self.key = replace(self.key, requires_grad=True)
        with torch.inference_mode(False), torch.no_grad():
            self._make_grads(Slot())

    def change_reduced_by(self, hook: Callable[[torch.Tensor], None]) -> None:
        """Sets the hook that changes reduced gradients in place, also later ones."""
        self._reduced_hook = hook
        if self.key.requires_grad:
            self.grads.change_reduced_by(hook)

    def _keeps_rows(self, rows: Mapping[nn.Parameter, torch.Tensor]) -> bool:
        """True if main weights can be in `rows`. A program may have views of these, such as a state
        dict of before the first forward."""
        if len(rows) < len(self.managed) or self.key.quantized or self._main_is_on_host():
            return False
        device = self.shards.runtime.device.type
        are_here = all(row.device.type == device for row in rows.values())
        are_used = are_here or self.config.host_rows
        return are_used and all(row.dtype == self._main_dtype() for row in rows.values())

    @property
    def _computes_with_rows(self) -> bool:
        """True if the rows that sharded parameters have may be the compute weights."""
        return self.is_single_rank and not self.config.host_rows

    def _build_weights(
        self,
        slot: Slot,
        quantized: QuantizedWeights | None,
        values: Mapping[nn.Parameter, torch.Tensor],
        rows: Mapping[nn.Parameter, torch.Tensor],
    ) -> None:
        # All rows, if main weights are in the tensors that sharded parameters have.
        self._own_rows = list(rows.values()) if self._keeps_rows(rows) else None
        # The weights that modules compute with.
        self.weights: Any = WeightBuffers(
            self.params,
            self.shards,
            self.key.format.planes,
            slot,
            is_kept=not self.config.strategy.shard_weights,
            keeps_shards=self._wants_shards(),
            is_gathered=self.shards.splits_axis and not self.is_single_rank,
            quantized=quantized,
            without_values=rows,
            own_rows=self._own_rows if self._computes_with_rows else None,
        )
        # The weights that the optimizer updates.
        self.main: Any = MainWeights(
            self._main_buffer(), self.weights, self.shards, self.params, values, rows
        )

    def _build_extended(self, slot: Slot, runtime: Runtime) -> None:
        """Weights of parameters that are gathered by functions of their own."""
        mesh = self.domain.mesh
        if mesh.ndim > 1:
            mesh = mesh[mesh.mesh_dim_names[-1]]  # type: ignore[index]
        size = self.domain.axis.size
        params = []
        for entry in self.managed:
            params.append(ExtendedParam(entry, mesh, size, self.key.dtype, runtime))
        nbytes = self.layout.item_numel * self.key.dtype.itemsize
        is_kept = not self.config.strategy.shard_weights
        self.weights = ExtendedWeights(params, nbytes, slot, is_kept)
        self.main = ExtendedMainWeights(params, self.key.own_dtype)

    @property
    def in_modules(self) -> list[nn.Parameter]:
        """The parameters that modules have while they are unsharded."""
        return [entry.in_module for entry in self.managed]

    @property
    def unsharded(self) -> list[nn.Parameter]:
        """The plain parameters over gathered weights."""
        return [entry.unsharded for entry in self.managed]

    def _wants_shards(self) -> bool:
        """True if a shard of the compute weights is kept beside unsharded ones that do not stay.

        It is with an outer axis: this is the slow network, and is gathered once a step then and not
        at every use. Keeping shards always was tried: a gather then copies this rank's own piece,
        which costs what the cast does (docs/contributing/results_experiments.md)."""
        stays = self.key.format.keeps_shards(self.key.requires_grad)
        return self.shards.splits_outer or self._main_is_on_host() or stays

    def _main_dtype(self) -> torch.dtype:
        # Frozen parameters have no optimizer: their main weights stay in their own dtype.
        chosen = self.config.policy.main_params_dtype if self.key.requires_grad else None
        return chosen or self.key.own_dtype

    def _main_is_on_host(self) -> bool:
        """True if main weights are in host memory: not if they are the compute weights, or if
        quantized weights are made of them on the device."""
        if not self.config.offload or not self.key.requires_grad:
            return False
        return self.key.quantized is None and self._main_dtype() != self.key.dtype

    def _main_buffer(self) -> ShardedBuffer:
        """The buffer that the optimizer updates."""
        dtype = self._main_dtype()
        if self._main_is_on_host():
            return self.shards.offloaded(dtype)
        is_plain = self.key.quantized is None
        same = is_plain and dtype == self.key.dtype and self.weights.is_kept
        if self._own_rows is not None and not (same and self._computes_with_rows):
            return buffer_of_rows(self.shards, self._own_rows)
        if same:
            return self.weights.unsharded[0]
        return self.shards.buffer(self.shards.held, dtype)


def rows_of_sharded(managed: Sequence[ManagedParam]) -> dict[nn.Parameter, torch.Tensor]:
    """This rank's rows of the parameters that are sharded already, by the unsharded ones."""
    found = {}
    for entry in managed:
        if entry.sharded is not None:
            found[entry.param] = entry.sharded._local_tensor  # type: ignore[attr-defined]
    return found


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
    """True if shards of main weights are split again over the outer axis. config: of the domain."""
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

    plan = plan_even if config.even_rows else plan_group

    def layout(unit: UnitPlan, key: GroupKey) -> GroupLayout:
        specs = tuple(entry.spec(index, key) for index, entry in enumerate(unit.groups[key]))
        known = unit.layouts.get(key)
        if known is not None and known.specs == specs:
            return known
        domain = domains[key.domain]
        shards = domain.axis.size
        if splits_outer(domain, config.of_domain(key.domain)):
            shards *= domain.outer_size
        return plan(specs, shards)

    found = []
    for unit in plans:
        layouts = {key: layout(unit, key) for key in unit.groups}
        found.append(replace(unit, layouts=layouts))
    return found


def by_domain(groups: Sequence[ParamGroup]) -> dict[str, list[ParamGroup]]:
    """The groups of each domain, in their order."""
    found: dict[str, list[ParamGroup]] = {}
    for group in groups:
        found.setdefault(group.key.domain, []).append(group)
    return found
