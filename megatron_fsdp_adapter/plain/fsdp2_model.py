"""The model that modules of `fully_shard` make: their marks, and the engine that shards it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..build.building import build_engine, for_training, with_single_rank_domains
from ..build.materialize import device_of_type, move, values_come_later
from ..core.config import STRATEGIES, EngineConfig
from ..core.engine.partition import (
    ManagedParam,
    UnitPlan,
    managed_params,
    partition,
    unit_modules,
    units_that_look_up,
)
from ..core.problems import raise_problems
from ..core.topology import DENSE
from ..plan.unit_grouping import as_one_unit
from ..quantized import TransformerEngineParams, format_of
from .accelerate import give_address
from .building import mark_shards
from .call_options import FullyShardOptions, ModelDomains, fewer_ranks
from .casts import cast_inputs_of, cast_outputs_of
from .feedback import announce
from .sharded_params import (
    ShardedParam,
    as_before_sharding,
    is_sharded_over,
    shard_params,
    waits_for_run,
)
from .user_loop import UserLoopEngine

SUBJECT = "fully_shard"
MARK = "_fsdp_adapter_mark"
WITHIN = "_fsdp_adapter_within"
"""Attribute of modules in a marked module: a weak reference to that one."""

ROOTS: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Marked modules that are in no other one."""

UnitSetting = Callable[[UserLoopEngine, Any], None]
"""Sets something of a unit, with the model's engine."""


@dataclass(eq=False)
class Model:
    """The modules that are sharded together: the outermost marked one, the root, and all in it."""

    # Weak, as modules refer to this by their marks.
    root: weakref.ref[nn.Module]
    # None until the model first runs.
    engine: UserLoopEngine | None = None
    # True if parameters are sharded only when the engine is made, and it is not being made yet.
    waits: bool = False
    # True if an optimizer steps on the device, with parameters that are in host memory.
    steps_on_device: bool = False


@dataclass
class Mark:
    """The mark of a module that `fully_shard` was called with."""

    # The options of its call: one object for the modules of one call, and another for each call.
    options: FullyShardOptions
    # The model whose root is the outermost marked module around it.
    model: Model
    # The module's unit; None until the model has an engine.
    unit: Any = None
    # The parameters that its call has sharded, by the id of the sharded one.
    params: dict[int, ShardedParam] = field(default_factory=dict)
    # What a program has set before there was an engine.
    settings: list[UnitSetting] = field(default_factory=list)
    # What sums of its unit's gradients are divided by; None for the number of ranks.
    divide_factor: float | None = None


def mark_of(module: nn.Module) -> Mark | None:
    """The mark of a module; None if `fully_shard` was not called with it."""
    return module.__dict__.get(MARK)


def marked(module: nn.Module) -> list[tuple[nn.Module, Mark]]:
    """The marked modules in `module`, and their marks."""
    found = []
    for child in module.modules():
        mark = mark_of(child)
        if mark is not None:
            found.append((child, mark))
    return found


def mark_on(module: Any) -> Mark:
    """The mark of a module that `fully_shard` was called with."""
    return module.__dict__[MARK]  # type: ignore[no-any-return]


def root_of(module: Any) -> nn.Module:
    """The outermost marked module around `module`."""
    root = mark_on(module).model.root()
    return module if root is None else root


def engine_of(module: Any) -> UserLoopEngine:
    """The engine of the model of `module`, which is made by the first call. That is collective.

    RuntimeError if parameters are on the meta device.
    """
    model = mark_on(module).model
    if model.engine is None:
        _build(root_of(module))
    assert model.engine is not None
    return model.engine


def make_engines(params: Iterable[Any]) -> None:
    """Makes the engines of models that have any of the sharded parameters `params`, for an
    optimizer that steps on the device. Collective.

    ValueError: an engine is there that has parameters in host memory for an optimizer of torch's.
    """
    ids = {id(param) for param in params}
    for root in list(ROOTS):
        if ids.isdisjoint(known_params(root)):
            continue
        model = mark_on(root).model
        if model.engine is None:
            model.steps_on_device = True
            engine_of(root)
        elif model.engine.config.host_rows:
            raise ValueError(
                "offload_policy=CPUOffloadPolicy(): the model has run, with parameters in host "
                "memory for an optimizer that steps there. Call fully_shard_optimizer before the "
                "model first runs, or leave the call out"
            )


def set_on(module: Any, recurse: bool, setting: UnitSetting) -> None:
    """Applies `setting` to the units of `module` and, if it is to `recurse`, of the marked modules
    in it: now, or as soon as there is an engine."""
    for one, mark in marked(module):
        if one is not module and not recurse:
            continue
        if mark.model.engine is None:
            mark.settings.append(setting)
        else:
            setting(mark.model.engine, mark.unit)


class OwnPlaces(NamedTuple):
    """Particulars of parameters of a call, by id: places of those that are not split by rows
    over its ranks, and dtypes."""

    # Options over the ranks of each that is to be sharded over other ones.
    elsewhere: dict[int, FullyShardOptions]
    # The dim of each that is not split along the first one.
    dims: dict[int, int]
    # The dtype in which each computes for which the policy has one of its own.
    computed: dict[int, torch.dtype]


def shard_now(
    module: nn.Module, options: FullyShardOptions, placed: OwnPlaces
) -> dict[int, ShardedParam]:
    """Shards the parameters of `module` that no earlier call has sharded or ignored, and moves its
    buffers to the mesh's device. Collective. placed: those that do not go where others do.

    Returns them by the ids of sharded ones. ValueError if the ranks' parameters differ."""
    device = device_of_type(module, options.device_type)
    move(module.buffers(), device)
    by_ranks: dict[FullyShardOptions, list[ManagedParam]] = {}
    for entry in params_to_shard(module, options):
        if not waits_for_run(entry.param):
            own = placed.elsewhere.get(id(entry.param), options)
            by_ranks.setdefault(own, []).append(entry)
    made = {}
    for own, entries in by_ranks.items():
        place = (own.groups, own.domain, device, own.keep, placed.dims)
        made_here = shard_params(SUBJECT, entries, *place)
        for entry, one in zip(entries, made_here, strict=True):
            computes_in = placed.computed.get(id(entry.param))
            made[id(one.sharded)] = one._replace(computes_in=computes_in)
    return made


def mark_as_root(module: nn.Module, mark: Mark) -> None:
    """Gives `module` its mark. It is the outermost marked module now, and its model is that of the
    marked modules in it."""
    module.__dict__[MARK] = mark
    ROOTS.difference_update(module.modules())
    ROOTS.add(module)
    for child in module.modules():
        child.__dict__[WITHIN] = weakref.ref(module)
        inner = mark_of(child)
        if inner is not None:
            inner.model = mark.model
    mark.model.waits = any(waits_for_run(entry.param) for entry in _not_ignored(module))


def params_to_shard(module: nn.Module, options: FullyShardOptions) -> list[ManagedParam]:
    """The parameters that a call with `module` and `options` is to shard: those that it does not
    ignore, and that no earlier call has sharded or ignored."""
    others = {*known_params(module), *map(id, options.ignored)}
    replaced: set[int] = set()  # DTensors that a program has put in the place of sharded parameters
    for child, _ in marked(module):
        replaced.update(id(entry.param) for entry in managed_params(child))
    found = []
    for entry in _not_ignored(module):
        key = id(entry.param)
        if key in others:
            continue
        if is_sharded_over(entry.param, options.domain) and (key in replaced or _is_known(key)):
            continue
        found.append(entry)
    return found


def _is_known(key: int) -> bool:
    """True if any call has sharded the parameter with this id: two units may share a module."""
    return any(key in known_params(root) for root in list(ROOTS))


def known_params(root: nn.Module) -> dict[int, ShardedParam]:
    """The parameters that calls with modules in `root` have sharded."""
    known: dict[int, ShardedParam] = {}
    for _, mark in marked(root):
        known |= mark.params
    return known


def _not_ignored(
    module: nn.Module, units: Mapping[str, nn.Module] = MappingProxyType({})
) -> list[ManagedParam]:
    """Parameters of `module` and the modules in it that no call ignores, with their units."""
    ignored = {id(param) for _, mark in marked(module) for param in mark.options.ignored}
    return [one for one in managed_params(module, units) if id(one.param) not in ignored]


@for_training()
def _build(root: nn.Module) -> None:
    """Makes the engine of the model `root`. Collective.

    Raises:
        ValueError: what cannot be sharded, ranks whose models differ, or options that differ
            between calls.
        RuntimeError: parameters are on the meta device.
        CommunicationError, RuntimeError: another rank has failed or is late.
    """
    model = mark_on(root).model
    model.waits = False
    for child, mark in marked(root):
        mark.model = model  # a module may have been marked before it was put here
        if child is not root:
            ROOTS.discard(child)
    unfilled = [name for name, param in root.named_parameters() if param.is_meta]
    if unfilled:
        raise RuntimeError(
            f"{SUBJECT}: {len(unfilled)} parameters are still on the meta device: "
            f"{unfilled[:4]}. Load a state dict, or call to_empty and initialize them, before "
            "the first forward"
        )
    if mark_on(root).options.offload:
        _refuse_device_rows(root)
    engine = _engine(root)
    model.engine = engine
    for child, mark in marked(root):
        options = mark.options
        if options.input_dtype is not None:
            cast_inputs_of(child, options.input_dtype)
        if options.policy.output_dtype is not None:
            cast_outputs_of(child, options.policy.output_dtype)
        if mark.divide_factor is not None:
            divide_grads(child, mark.divide_factor)
        for setting in mark.settings:
            setting(engine, mark.unit)
        mark.settings.clear()
    announce(root, engine)


def _refuse_device_rows(root: nn.Module) -> None:
    """RuntimeError if sharded parameters are not in host memory, but are to be."""
    names = []
    for name, param in root.named_parameters():
        if isinstance(param, DTensor) and param.device.type != "cpu":
            names.append(name)
    if names:
        raise RuntimeError(
            f"{SUBJECT}: offload_policy=CPUOffloadPolicy(), but {len(names)} parameters are on "
            f"another device: {names[:4]}. Use to_empty(device='cpu') before the first forward"
        )


def divide_grads(module: Any, factor: float) -> None:
    """Divides sums of gradients of the module's unit by `factor`, now or when it is sharded."""
    mark = mark_on(module)
    mark.divide_factor = factor
    engine = mark.model.engine
    if engine is None:
        return
    if mark.unit is not engine.root or module is root_of(module):  # else it has no parameters
        engine.divide_grads(mark.unit.groups, factor)


def _params_of_model(
    root: nn.Module, units: Mapping[str, nn.Module], domains: ModelDomains
) -> list[ManagedParam]:
    """Parameters of the model `root` and their units, with those that modules are to have in a
    forward. Leaves out frozen ones that have joined it since the calls. Adds to `domains`.

    ValueError if others have: no rank would have the gradients of others."""
    device = device_of_type(root, mark_on(root).options.device_type)
    known = known_params(root)
    found = []
    joined = []
    for entry in _not_ignored(root, units):
        one = known.get(id(entry.param))
        around = mark_on(units.get(entry.unit, root)).options.domain
        domain = around if one is None else one.domain
        if waits_for_run(entry.param):
            found.append(replace(entry, domain=domains.name_of(domain)))
        elif one is not None or is_sharded_over(entry.param, domain):
            own = replace(entry, domain=domains.name_of(domain))
            found.append(as_before_sharding(own, one, domain, device))
        elif entry.param.requires_grad:
            joined.append(
                f"parameter {entry.fqns[0]} joined the model after the call of fully_shard with "
                "its module, so each rank would train its own. Add it before, or call fully_shard "
                "with the new module, too"
            )
    raise_problems(SUBJECT, joined)
    return found


def _engine(root: nn.Module) -> UserLoopEngine:
    """The engine that shards `root`. Collective. Raises as `_build`."""
    options = [mark.options for _, mark in marked(root)]
    raise_problems(SUBJECT, _options_that_differ(options))
    device = device_of_type(root, mark_on(root).options.device_type)
    move(root.buffers(), device)
    domains = ModelDomains({DENSE: mark_on(root).options.domain})
    plans = _plans(root, domains)
    config = with_single_rank_domains(_config(root, options), domains)
    shown = _show_unsharded(plans)
    try:
        engine = build_engine(
            UserLoopEngine,
            SUBJECT,
            root,
            plans,
            domains,
            config,
            device,
            lambda module, parent: values_come_later,
            quantized=TransformerEngineParams(),
        )
    except BaseException:
        for params, name, sharded in shown:
            params[name] = sharded
        raise
    engine.set_auto_sync(True)
    _set_units(engine, root, plans)
    mark_shards(engine, root, root)
    for pair in engine.pairs:
        give_address(pair.sharded)
    return engine


def _show_unsharded(plans: Iterable[UnitPlan]) -> list[tuple[dict[str, Any], str, Any]]:
    """Puts unsharded parameters in the places of sharded ones. Returns the places and these."""
    shown: list[tuple[dict[str, Any], str, Any]] = []
    for entry in _entries_of(plans):
        if entry.sharded is not None:
            for owner, name in entry.slots:
                shown.append((owner._parameters, name, entry.sharded))
                owner._parameters[name] = entry.in_module
    return shown


def _entries_of(plans: Iterable[UnitPlan]) -> Iterator[ManagedParam]:
    for plan in plans:
        for entries in plan.groups.values():
            yield from entries


def _plans(root: nn.Module, domains: ModelDomains) -> list[UnitPlan]:
    """The plans of the units of the model `root`. Adds to `domains`."""
    units = unit_modules(root, lambda child: mark_of(child) is not None)
    look_ups = {nn.Embedding}
    for child in units.values():
        # The class of a marked module is a subclass of its own one.
        if isinstance(child, nn.Embedding) and type(child).forward is nn.Embedding.forward:
            look_ups.add(type(child))
    known = known_params(root)
    entries = []
    for entry in _params_of_model(root, units, domains):
        policy = mark_on(units.get(entry.unit, root)).options.policy
        dtype = policy.param_dtype
        found = known.get(id(entry.sharded))
        if found is not None and found.computes_in is not None:
            dtype = found.computes_in
        if entry.extension is not None:
            entry.extension.policy = policy
        entries.append(replace(entry, format=format_of(entry), compute_dtype=dtype))
    return _joined_by_call(root, partition(units, entries, units_that_look_up(units, look_ups)))


def _set_units(engine: UserLoopEngine, root: nn.Module, plans: Sequence[UnitPlan]) -> None:
    """Sets the unit of each mark, and what its modules show after forward."""
    for _, mark in marked(root):
        mark.unit = engine.root
    for unit, plan in zip(engine.units, plans, strict=True):
        for module in plan.modules:
            mark_on(module).unit = unit
            kept_over = mark_on(module).options.kept_over
            if kept_over is not None:
                fewer = {}
                for group in unit.groups:
                    fewer[group.key.domain] = fewer_ranks(group.domain.axis.group, kept_over)
                engine.gather.keep_over(unit, fewer)
        options = mark_on(root if plan.module is None else plan.module).options
        unit.stay_shown(forward=not options.reshards or (unit is engine.root and options.is_auto))


def _joined_by_call(root: nn.Module, plans: Iterable[UnitPlan]) -> list[UnitPlan]:
    """`plans`, those of the modules of one call joined to one. Where the call says that weights
    stay after forward, the plan gets the strategy that does this."""
    found: dict[int, UnitPlan] = {}
    for plan in plans:
        options = mark_on(root if plan.module is None else plan.module).options
        call = id(plan)  # the root's plan stays alone
        plan = replace(plan, policy=options.grads_policy)
        if plan.module is not None:
            call = id(options)
            if not options.reshards:
                plan = replace(plan, strategy=STRATEGIES["optim_grads"])
        if call in found:
            plan = as_one_unit(found[call], plan)
        found[call] = plan
    return list(found.values())


def _options_that_differ(options: Sequence[FullyShardOptions]) -> list[str]:
    """One problem, or none: the first option that is not equal in all calls, but must be."""
    first = options[0].of_the_model()
    for one in options:
        for name, value in one.of_the_model().items():
            if value != first[name]:
                return [
                    f"{name}={value}: another call for this model was given {first[name]}. Give "
                    "all calls the same"
                ]
    return []


def _config(root: nn.Module, options: Sequence[FullyShardOptions]) -> EngineConfig:
    """The engine's configuration. Each unit has a policy of its own, too."""
    on_device = mark_on(root).model.steps_on_device
    return EngineConfig(
        strategy=STRATEGIES["optim_grads_params"],
        policy=mark_on(root).options.grads_policy,
        offload=options[0].offload and on_device,
        host_rows=options[0].offload and not on_device,
        even_rows=True,
        units_switch=True,
    )
