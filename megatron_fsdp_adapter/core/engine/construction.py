"""What the engine makes once, around its units."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import nn

from megatron_fsdp_adapter.core.config import EngineConfig
from megatron_fsdp_adapter.core.runtime.comm import Communicator
from megatron_fsdp_adapter.core.runtime.device import Runtime
from megatron_fsdp_adapter.core.topology import ShardDomain

from .buffer import FlatBuffer
from .buffer_pool import AllocateSlots, BufferPool, plan_weights_and_buckets, unit_buffers
from .group import ParamGroup
from .partition import UnitPlan
from .quantized import QuantizedWeights
from .unit import Phase, Unit


def broadcast_weights(
    plan: UnitPlan, quantized: QuantizedWeights | None, *axes: Mapping[str, Communicator]
) -> dict[nn.Parameter, torch.Tensor]:
    """Gives all ranks of a domain the first rank's weights, along one axis after the other. Every
    rank keeps other rows, so ranks that were initialized differently would otherwise shard a model
    that none of them had.

    Returns what main weights begin as, where compute weights are not exactly that: of parameters
    with another compute dtype their values, of quantized ones what `share` gives."""
    values = {}
    for key, managed in plan.groups.items():
        for entry in managed:
            mine = [axis[key.domain] for axis in axes if key.domain in axis]
            for communicator in mine:
                communicator.carries = f"parameter {entry.fqns[0]} of unit {plan.name}"
            if quantized is None or not key.quantized:
                _broadcast(entry.param.data, mine)
                if key.given is not None:
                    values[entry.param] = entry.param.data
                continue
            share = partial(_broadcast, communicators=mine)
            values[entry.param] = quantized.share(entry.param, share)
    return values


def _broadcast(tensor: torch.Tensor, communicators: Sequence[Communicator]) -> None:
    whole = tensor.contiguous()  # scales may be a part of padded ones
    for communicator in communicators:
        communicator.broadcast(whole)
    if whole is not tensor and communicators:
        tensor.copy_(whole)


def check_known(plans: Sequence[UnitPlan], quantized: QuantizedWeights | None) -> None:
    """Raises ValueError if the plans have quantized weights and `quantized` is None."""
    formats = {key.format.name for plan in plans for key in plan.groups if key.quantized}
    if formats and quantized is None:
        raise ValueError(
            f"quantized=None, and the plans have weights of formats {sorted(formats)}: give the "
            "engine the QuantizedWeights of the library that made them"
        )


def make_pools(
    plans: Sequence[UnitPlan],
    domains: Mapping[str, ShardDomain],
    config: EngineConfig,
    allocate: AllocateSlots,
) -> tuple[BufferPool | None, BufferPool | None]:
    """Of weights and of buckets, as far as both are transient and slots are asked for."""
    strategy = config.strategy
    wanted = (
        config.weight_slots and strategy.shard_weights,
        config.bucket_slots and strategy.shard_grads,
    )
    if not any(wanted):
        return None, None
    own = [config.for_unit(plan.strategy) for plan in plans]
    kinds = [type(plan.module).__name__ for plan in plans]
    depths = [plan.inside for plan in plans]
    layouts = [
        [
            layout for key, layout in plan.layouts.items() if key.domain not in config.whole
        ]
        for plan in plans
    ]
    zipped = list(zip(own, layouts, strict=True))
    weights, buckets = (
        BufferPool(slots, allocate) if want and any(slots.nbytes) else None
        for want, slots in zip(
            wanted,
            plan_weights_and_buckets(
                kinds, layouts, config.policy.comm_dtype, depths,
                [one.strategy.shard_weights and bool(lay) for one, lay in zipped],
                [one.has_buckets and bool(lay) for one, lay in zipped],
                [one.narrows_buckets for one in own],
            ),
            strict=True,
        )
    )
    return weights, buckets


def build_units(
    plans: Sequence[UnitPlan], domains: Mapping[str, ShardDomain], config: EngineConfig,
    runtime: Runtime, allocate: AllocateSlots,
    make_ready: Callable[[UnitPlan], dict[nn.Parameter, torch.Tensor]],
    quantized: QuantizedWeights | None,
) -> list[Unit]:  # fmt: skip
    """One unit at a time, resharded at once, so that initialization needs no more than the shards
    and one unit beside the module's own weights. make_ready: `values` of a plan's `ParamGroup`s."""
    weights, buckets = make_pools(plans, domains, config, allocate)
    units = []
    for ordinal, plan in enumerate(plans):
        values, groups = make_ready(plan), []
        for key, managed in plan.groups.items():
            own = config.for_group(plan.strategy, key.domain)
            staging = unit_buffers(runtime, ordinal, own, weights, buckets)
            groups += [ParamGroup(
                f"{plan.name}/{key.domain}", key, managed, plan.layouts[key],
                domains[key.domain], own, staging, quantized if key.quantized else None, values,
            )]  # fmt: skip
        strategy = config.for_unit(plan.strategy).strategy
        units.append(Unit(plan, ordinal, groups, strategy, quantized))
        if not units[-1].keeps_weights:
            units[-1].advance(Phase.SHARDED)
            units[-1].release_weights()
    return units


def memory_of_exchanges(
    groups: Sequence[ParamGroup], config: EngineConfig, runtime: Runtime, allocate: AllocateSlots
) -> FlatBuffer | None:
    """Room for what is received in the largest bucket of a slot, used by one reduction after the
    other; None where there is no such bucket."""
    if not config.reduce_scatter.fixed:
        return None
    nbytes = [
        group.bucket.nbytes
        for group in groups
        if group.key.requires_grad and group.staging.bucket_slot is not None
    ]
    if not nbytes:
        return None
    return FlatBuffer(max(nbytes), torch.uint8, runtime, allocate([max(nbytes)])[0])


def abandon(runtime: Callable[[], Runtime | None]) -> None:
    """Empties the queues of a runtime that is still there."""
    alive = runtime()
    if alive is not None:
        alive.abandon()
