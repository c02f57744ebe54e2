"""Communicators, buffers and units of an engine, made once."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from megatron_fsdp_adapter.core.comm.communicator import (
    ALL_REDUCE,
    ALONE,
    REDUCE_SCATTER,
    Communicator,
)
from megatron_fsdp_adapter.core.comm.managed import ManagedCommunicator
from megatron_fsdp_adapter.core.config import EngineConfig
from megatron_fsdp_adapter.core.runtime.device import Runtime
from megatron_fsdp_adapter.core.topology import ShardDomain

from .buffer import (
    AllocateSlots,
    FlatBuffer,
    Slot,
    buckets_in_slot,
    make_slots,
    weights_in_slot,
)
from .extensions import take_compute_dtype
from .grad_dtypes import set_grad_dtypes
from .group import ParamGroup
from .launches import REDUCED, REDUCED_OUTER
from .params import ParameterSwitch, ParamPair, UnitSlots
from .partition import GroupKey, UnitPlan
from .quantized import QuantizedWeights
from .reduction import DomainReduce
from .tensor_parallel import show_gathered
from .unit import Phase, Unit

MakeCommunicator = Callable[[Any, torch.device], Communicator]


class Communicators(NamedTuple):
    """The communicators of an engine, by name of domain."""

    # For gathers over the shard axis.
    gather: dict[str, Communicator]
    # For reductions over the shard axis.
    reduce: dict[str, Communicator]
    # For the outer axis, of domains that have one.
    outer: dict[str, Communicator]
    # For replicas of torchft's, of domains that have a manager.
    managed: dict[str, ManagedCommunicator]


def used_domains(
    plans: Sequence[UnitPlan], domains: Mapping[str, ShardDomain]
) -> dict[str, ShardDomain]:
    """The domains of which `plans` have parameters, in the order in which they come there."""
    names = dict.fromkeys(key.domain for plan in plans for key in plan.groups)
    return {name: domains[name] for name in names}


def communicators(
    domains: Mapping[str, ShardDomain], make: MakeCommunicator, runtime: Runtime
) -> Communicators:
    """Makes the communicators of each domain."""
    device = runtime.device
    gather = {name: make(one.gather_group, device) for name, one in domains.items()}
    reduce = {name: make(one.reduce_group, device) for name, one in domains.items()}
    outer = {name: make(one.outer.group, device) for name, one in domains.items() if one.outer}
    managed = {}
    for name, one in domains.items():
        if one.manager is not None:
            managed[name] = ManagedCommunicator(one.manager, device)
    return Communicators(gather, reduce, outer, managed)


def broadcast_weights(
    plan: UnitPlan, quantized: QuantizedWeights | None, *axes: Mapping[str, Communicator]
) -> dict[nn.Parameter, torch.Tensor]:
    """Broadcasts the first rank's weights to all ranks of a domain, along one axis after the other.

    Each rank keeps other rows: without this, ranks that were initialized differently would shard a
    model that none of them had.

    Returns the first main weights of those parameters whose compute weights are not equal to them:
    of parameters with another compute dtype, and of quantized ones (`QuantizedWeights.share`).
    Parameters that are sharded already have none."""
    values = {}
    for key, managed in plan.groups.items():
        for entry in managed:
            param = entry.param
            if entry.sharded is not None and not key.quantized:
                continue
            mine = [axis[key.domain] for axis in axes if key.domain in axis]
            for communicator in mine:
                communicator.carries = f"parameter {entry.fqns[0]} of unit {plan.name}"
            if quantized is not None and key.quantized:
                share = partial(_broadcast, communicators=mine)
                values[param] = quantized.share(param, share)
                continue
            _broadcast(param.data, mine)
            if key.given is not None:
                values[param] = param.data
    return values


def _broadcast(tensor: torch.Tensor, communicators: Sequence[Communicator]) -> None:
    whole = tensor.contiguous()  # scales may be a part of padded ones
    for communicator in communicators:
        communicator.broadcast(whole)
    if whole is not tensor and communicators:
        tensor.copy_(whole)


class InSlots(NamedTuple):
    """The parts of a group that are in the slots of its unit."""

    # Its gathered weights.
    weights: bool
    # Its bucket.
    bucket: bool


def in_slots(plan: UnitPlan, key: GroupKey, config: EngineConfig) -> InSlots:
    """The parts of a group, in the unit of `plan`, that are in slots: those that come and go. There
    are none in a domain of one rank."""
    if key.domain in config.whole:
        return InSlots(weights=False, bucket=False)
    of_domain = config.of_domain(key.domain)
    own = config.for_group(plan.strategy, key.domain)
    reduces_each = of_domain.strategy.shard_grads and own.has_buckets
    return InSlots(
        weights=config.weight_slots and own.strategy.shard_weights,
        bucket=config.bucket_slots and reduces_each,
    )


def unit_slots(
    plans: Sequence[UnitPlan], config: EngineConfig, allocate: AllocateSlots
) -> list[tuple[Slot, Slot]]:
    """Each unit's slots, of weights and of buckets. A slot has no memory if the config does not ask
    for such slots, or if these weights or buckets do not come and go.

    Only groups whose weights or buckets come and go take something of a slot (`in_slots`)."""
    kinds = [type(plan.module).__name__ for plan in plans]
    depths = [plan.inside for plan in plans]
    comm = config.policy.comm_dtype
    weights: list[int | None] = []
    buckets: list[int | None] = []
    for plan in plans:
        gathered = []
        reduced = []
        for key, layout in plan.layouts.items():
            takes = in_slots(plan, key, config)
            if takes.weights:
                gathered.append(layout)
            if takes.bucket:
                narrows = config.for_group(plan.strategy, key.domain).narrows_buckets
                reduced.append(buckets_in_slot([layout], comm, narrows))
        weights.append(weights_in_slot(gathered) if gathered else None)
        buckets.append(sum(reduced) if reduced else None)
    of_weights = make_slots(kinds, weights, depths, allocate)
    of_buckets = make_slots(kinds, buckets, depths, allocate)
    return list(zip(of_weights, of_buckets, strict=True))


def config_of(
    plan: UnitPlan, key: GroupKey, config: EngineConfig, domain: ShardDomain
) -> EngineConfig:
    """The configuration of one group of the unit of `plan`, in its domain."""
    policy = plan.policy or config.policy
    if key.may_be_trained:
        policy = policy.of_params(key.own_dtype, key.dtype)
    # Where torch's FSDP2 rounds gradients, or reduces those of a backward before it adds them.
    is_apart = policy.comm_dtype != policy.grads_dtype or domain.has_replicas
    return config.for_group(
        plan.strategy, key.domain, policy, in_bucket=policy.as_fsdp2 and is_apart
    )


def build_units(
    plans: Sequence[UnitPlan],
    domains: Mapping[str, ShardDomain],
    config: EngineConfig,
    runtime: Runtime,
    allocate: AllocateSlots,
    comms: Communicators,
    prepare: Callable[[UnitPlan], None],
    quantized: QuantizedWeights | None,
) -> list[Unit]:
    """Builds and reshards one unit after the other, root last. prepare: as of `FsdpEngine`.

    So initialization needs no more than the shards and one unit beside the module's own weights."""
    units = []
    slots = unit_slots(plans, config, allocate)
    for ordinal, plan in enumerate(plans):
        prepare(plan)
        take_compute_dtype(plan)
        values = broadcast_weights(plan, quantized, comms.outer, comms.reduce)
        groups = []
        for key, managed in plan.groups.items():
            takes = in_slots(plan, key, config)
            of_weights, of_bucket = slots[ordinal]
            group = ParamGroup(
                name=f"{plan.name}/{key.domain}",
                key=key,
                managed=managed,
                layout=plan.layouts[key],
                domain=domains[key.domain],
                config=config_of(plan, key, config, domains[key.domain]),
                runtime=runtime,
                slots=(
                    of_weights if takes.weights else Slot(),
                    of_bucket if takes.bucket else Slot(),
                ),
                quantized=quantized if key.quantized else None,
                values=values,
            )
            groups.append(group)
        show_gathered(plan)
        for group in groups:
            set_grad_dtypes(group.managed, group.config.policy, begins_sums=False)
        unit = Unit(plan, ordinal, groups, plan.strategy or config.strategy, quantized)
        units.append(unit)
        if not unit.keeps_weights:
            unit.advance(Phase.SHARDED)
            unit.release_weights()
    return units


def domain_reduces(
    config: EngineConfig,
    domains: Mapping[str, ShardDomain],
    communicators: Mapping[str, Communicator],
    received: FlatBuffer | None,
) -> dict[str, DomainReduce]:
    """The reductions over the shard axis of each domain. Groups have dtypes of their own
    (`DomainReduce.of`)."""
    found = {}
    for name, domain in domains.items():
        own = config.for_group(None, name)
        way = own.reduce_scatter if own.strategy.shard_main else ALL_REDUCE
        if name in config.whole and not config.policy.as_fsdp2:
            way = ALONE
        found[name] = DomainReduce(
            REDUCED, communicators[name], way, scale=domain.grad_scale, received=received
        )
    return found


def outer_reduces(config: EngineConfig, comms: Communicators) -> dict[str, DomainReduce]:
    """The reductions over the outer axis of each domain that has one. They are in place, and scale
    nothing: gradients were scaled over the shard axis, and torchft's manager gives means."""
    found = {}
    for name, communicator in comms.outer.items():
        way = REDUCE_SCATTER if config.of_domain(name).shard_outer else ALL_REDUCE
        found[name] = DomainReduce(REDUCED_OUTER, communicator, way)
    for name, managed in comms.managed.items():
        found[name] = DomainReduce(REDUCED_OUTER, managed, ALL_REDUCE)
    return found


def first_completed(units: Sequence[Unit]) -> list[int]:
    """The ordinals in the order in which the first backward is expected to complete the units.

    In most models the first unit's inputs need no gradient, so it is completed at the end of
    backward, behind the root."""
    *inner, root = [unit.ordinal for unit in units]
    return [*inner[:0:-1], root, *inner[:1]]


def memory_of_exchanges(
    groups: Sequence[ParamGroup], config: EngineConfig, runtime: Runtime, allocate: AllocateSlots
) -> FlatBuffer | None:
    """Memory for what a rank receives of the largest bucket that is in a slot. One reduction after
    the other uses it. None if the way to reduce needs no such memory, or no bucket is in a slot."""
    if not config.reduce_scatter.fixed:
        return None
    trained = [group.grads for group in groups if group.key.requires_grad]
    nbytes = [grads.bucket.nbytes for grads in trained if grads.slot.memory is not None]
    if not nbytes:
        return None
    largest = max(nbytes)
    return FlatBuffer(largest, torch.uint8, runtime, allocate([largest])[0])


def switch_of(
    units: Sequence[Unit], pairs: Sequence[ParamPair], config: EngineConfig
) -> ParameterSwitch:
    """Gives `units` the places of their parameters in modules. Returns what switches them."""
    every = []
    for unit in units:
        own = [pair for pair in pairs if pair.group in unit.groups]
        slots = UnitSlots(own, config.units_switch)
        unit.take_slots(slots)
        every.append(slots)
    return ParameterSwitch(every)


def abandon_after(engine: object, runtime: Runtime) -> None:
    """Has the queues of `runtime` emptied when `engine` is freed. What waits in one refers to the
    runtime: a cycle, if it is not cut.

    The runtime is held weakly. `finalize` would otherwise keep alive all that its queues reach:
    the engine itself, once a model config refers to the wrapper (`no_sync_func`)."""
    weakref.finalize(engine, _abandon, weakref.ref(runtime)).atexit = False


def _abandon(runtime: Callable[[], Runtime | None]) -> None:
    alive = runtime()
    if alive is not None:
        alive.abandon()
