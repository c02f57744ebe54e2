"""Communicators, buffers and units of an engine, made once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from megatron_fsdp_adapter.core.comm.communicator import (
    ALL_REDUCE,
    ALONE,
    REDUCE_SCATTER,
    Communicator,
)
from megatron_fsdp_adapter.core.config import EngineConfig
from megatron_fsdp_adapter.core.runtime.device import Runtime
from megatron_fsdp_adapter.core.topology import ShardDomain

from .buffer import (
    AllocateSlots,
    FlatBuffer,
    Slot,
    buckets_in_slot,
    make_slots,
    ordinary_memory,
    weights_in_slot,
)
from .gather import GatherPipeline, PrefetchOrder
from .group import ParamGroup
from .launches import REDUCED, REDUCED_OUTER, LaunchComparison
from .partition import UnitPlan
from .quantized import QuantizedWeights
from .reduce import DomainReduce, GradCheck, ReducePipeline
from .unit import Phase, Unit

MakeCommunicator = Callable[[Any, torch.device], Communicator]
OfDomains = dict[str, Communicator]


def allocator(given: AllocateSlots | None, runtime: Runtime) -> AllocateSlots:
    """The function that makes the memory of fixed slots: ordinary memory, unless one is given."""
    return given or ordinary_memory(runtime.device)


def communicators(
    domains: Mapping[str, ShardDomain], make: MakeCommunicator, runtime: Runtime
) -> tuple[OfDomains, OfDomains, OfDomains]:
    """Communicators by domain: for gathers and for reductions over the shard axis, and for the
    outer axis, where there is one."""
    device = runtime.device
    gathers = {name: make(domain.gather_group, device) for name, domain in domains.items()}
    reduces = {name: make(domain.reduce_group, device) for name, domain in domains.items()}
    outer = {n: make(one.outer.group, device) for n, one in domains.items() if one.outer}
    return gathers, reduces, outer


def broadcast_weights(
    plan: UnitPlan, quantized: QuantizedWeights | None, *axes: Mapping[str, Communicator]
) -> dict[nn.Parameter, torch.Tensor]:
    """Broadcasts the first rank's weights to all ranks of a domain, along one axis after the other.
    Each rank keeps other rows, so ranks that were initialized differently would shard a model that
    none of them had.

    Returns the first main weights of parameters whose compute weights are not equal to them: values
    of those with another compute dtype, and what `share` gives of quantized ones."""
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


def unit_slots(
    plans: Sequence[UnitPlan], config: EngineConfig, allocate: AllocateSlots
) -> list[tuple[Slot, Slot]]:
    """The slots of weights and of buckets of each unit, where these are transient and slots are
    asked for. Groups in domains of one rank have none."""
    kinds = [type(plan.module).__name__ for plan in plans]
    depths, comm = [plan.inside for plan in plans], config.policy.comm_dtype
    weights: list[int | None] = []
    buckets: list[int | None] = []
    for plan in plans:
        own = config.for_unit(plan.strategy)
        unit = [
            layout for key, layout in plan.layouts.items() if key.domain not in config.whole
        ]
        gathers = unit and own.strategy.shard_weights and config.weight_slots
        reduces = unit and own.has_buckets and config.bucket_slots and config.strategy.shard_grads
        weights.append(weights_in_slot(unit) if gathers else None)
        buckets.append(buckets_in_slot(unit, comm, own.narrows_buckets) if reduces else None)
    made = [make_slots(kinds, sizes, depths, allocate) for sizes in (weights, buckets)]
    return list(zip(*made, strict=True))


def build_units(
    plans: Sequence[UnitPlan], domains: Mapping[str, ShardDomain], config: EngineConfig,
    runtime: Runtime, allocate: AllocateSlots,
    make_ready: Callable[[UnitPlan], dict[nn.Parameter, torch.Tensor]],
    quantized: QuantizedWeights | None,
) -> list[Unit]:  # fmt: skip
    """One unit at a time, resharded at once, so that initialization needs no more than the shards
    and one unit beside the module's own weights. make_ready: `values` of a plan's `ParamGroup`s."""
    units, slots = [], unit_slots(plans, config, allocate)
    for ordinal, plan in enumerate(plans):
        values, groups = make_ready(plan), []
        for key, managed in plan.groups.items():
            own = config.for_group(plan.strategy, key.domain)
            alone = key.domain in config.whole
            groups += [ParamGroup(
                f"{plan.name}/{key.domain}", key, managed, plan.layouts[key], domains[key.domain],
                own, runtime, (Slot(), Slot()) if alone else slots[ordinal],
                quantized if key.quantized else None, values,
            )]  # fmt: skip
        strategy = config.for_unit(plan.strategy).strategy
        units.append(Unit(plan, ordinal, groups, strategy, quantized))
        if not units[-1].keeps_weights:
            units[-1].advance(Phase.SHARDED)
            units[-1].release_weights()
    return units


def domain_reduces(
    config: EngineConfig, domains: Mapping[str, ShardDomain],
    communicators: Mapping[str, Communicator], received: FlatBuffer | None,
) -> dict[str, DomainReduce]:
    """The reductions over the shard axis of each domain."""
    found = {}
    for name, domain in domains.items():
        own = config.for_group(None, name)
        comm, main = own.policy.comm_dtype, own.policy.grads_dtype
        way = own.reduce_scatter if own.strategy.shard_main else ALL_REDUCE
        scaled = "result" if comm.itemsize > main.itemsize else "shard"
        found[name] = DomainReduce(
            REDUCED, communicators[name], ALONE if name in config.whole else way, comm == main,
            domain.grad_scale, "sent" if own.scale_before_sum else scaled, received,
        )
    return found


def outer_reduces(
    config: EngineConfig, communicators: Mapping[str, Communicator]
) -> dict[str, DomainReduce]:
    """The reductions over outer axes, in place, of what has been reduced and scaled."""
    way = REDUCE_SCATTER if config.shard_outer else ALL_REDUCE
    return {name: DomainReduce(REDUCED_OUTER, one, way) for name, one in communicators.items()}


def pipelines(
    units: Sequence[Unit], groups: Sequence[ParamGroup], domains: Mapping[str, ShardDomain],
    config: EngineConfig, runtime: Runtime, communicators: tuple[OfDomains, OfDomains, OfDomains],
    allocate: AllocateSlots, order: PrefetchOrder, grad_check: GradCheck | None,
) -> tuple[GatherPipeline, ReducePipeline, LaunchComparison]:  # fmt: skip
    """Makes the pipelines that gather and reduce the units, and the comparison of launches."""
    gathers, reduces, outer = communicators
    launches = LaunchComparison(runtime, [*reduces.values(), *outer.values()])
    gather = GatherPipeline(units, config, runtime, gathers, outer, order, launches)
    received = memory_of_exchanges(groups, config, runtime, allocate)
    reduce = ReducePipeline(
        config, runtime, domain_reduces(config, domains, reduces, received),
        outer_reduces(config, outer), launches, grad_check,
    )  # fmt: skip
    return gather, reduce, launches


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
        if group.key.requires_grad and group.bucket_slot.memory is not None
    ]
    if not nbytes:
        return None
    return FlatBuffer(max(nbytes), torch.uint8, runtime, allocate([max(nbytes)])[0])


def abandon(runtime: Callable[[], Runtime | None]) -> None:
    """Empties the queues of a runtime that is still there."""
    alive = runtime()
    if alive is not None:
        alive.abandon()
