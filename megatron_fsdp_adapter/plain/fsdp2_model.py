"""The model that modules of `fully_shard` make: their marks, and the engine that shards it."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from ..build.building import build_engine, for_training, with_single_rank_domains
from ..build.materialize import device_of_type, move, values_come_later
from ..core.config import STRATEGIES, EngineConfig
from ..core.config import MixedPrecisionPolicy as Policy
from ..core.distributed_index import FSDPDistributedIndex
from ..core.dtensor.uneven import dtensor_over
from ..core.engine.extensions import dtensor_of_rows, rows_of_rank, with_extension
from ..core.engine.partition import (
    ManagedParam,
    UnitPlan,
    managed_params,
    partition,
    unit_modules,
    units_that_look_up,
)
from ..core.engine.tensor_parallel import as_managed, sharded_place
from ..core.problems import raise_problems
from ..core.topology import DENSE, ShardDomain
from ..plan.module_problems import module_problems
from ..plan.unit_grouping import as_one_unit
from ..quantized import TransformerEngineParams, format_of
from .accelerate import give_addresses
from .building import mark_shards, trained_dtype
from .casts import cast_inputs_of, cast_outputs_of
from .extended import is_extended
from .feedback import announce
from .mesh import MeshGroups, rank_count
from .user_loop import UserLoopEngine

SUBJECT = "fully_shard"
MARK = "_fsdp_adapter_mark"
PENDING = "pending"
ON_META = "on the meta device"
BUILDING = "being built"
BUILT = "built"


@dataclass(frozen=True)
class FullyShardOptions:
    """The arguments of one call of `fully_shard`.

    Attributes:
        groups: those of the shard axis and of the replicas.
        mesh: the mesh that parameters show; None if the call has none.
        reshards: whether weights are resharded after forward.
        ignored: parameters that are not sharded.
        device_type: type of the devices that have the shards.
    """

    groups: MeshGroups
    mesh: DeviceMesh | None
    reshards: bool
    policy: MixedPrecisionPolicy
    offload: bool
    ignored: frozenset[nn.Parameter]
    device_type: str

    def __post_init__(self) -> None:
        _check_compute_dtype(self.policy.param_dtype)

    @property
    def input_dtype(self) -> torch.dtype | None:
        """The dtype to which inputs are cast; None if they are not."""
        return self.policy.param_dtype if self.policy.cast_forward_inputs else None

    def of_the_model(self) -> dict[str, Any]:
        """The options that are the same for all modules of a model."""
        return {
            "mesh": self.groups,
            "mp_policy.reduce_dtype": self.policy.reduce_dtype,
            "offload_policy": self.offload,
        }


def _check_compute_dtype(dtype: torch.dtype | None) -> None:
    """Raises ValueError for a dtype that weights cannot have in a forward."""
    Policy(compute_dtype=dtype)  # the engine's policy, which raises when it is made


@dataclass(eq=False)
class Model:
    """The modules that are sharded together: the outermost marked one, the root, and all in it."""

    # Weak, as modules refer to this by their marks.
    root: weakref.ref[nn.Module]
    # PENDING until it is sharded; ON_META while it shows DTensors without memory (`show_on_meta`);
    # BUILDING while it is being sharded, or in `unsharded_reads`; then BUILT.
    state: str = PENDING
    # None until it is sharded.
    engine: UserLoopEngine | None = None


@dataclass
class Mark:
    """The mark of a module that `fully_shard` was called with."""

    # The options of its call: one object for the modules of one call, and another for each call.
    options: FullyShardOptions
    # The model whose root is the outermost marked module around it.
    model: Model
    # The module's unit; None until the model is sharded.
    unit: Any = None
    # What sums of its unit's gradients are divided by; None for the number of ranks.
    divide_factor: float | None = None


class PendingParameters(dict[str, Any]):
    """`_parameters` of a module in a model that is to be sharded. `items` shards the model first:
    `parameters()` of a module around the model calls it. Reads by name shard nothing."""

    # The mark of the module that was given to `fully_shard`.
    mark: Mark
    # The module whose parameters these are.
    owner: nn.Module

    def items(self) -> Any:
        if self.mark.model.state is not PENDING:
            return super().items()
        root: Any = self.mark.model.root()
        if not show_on_meta(root):
            _build(root)
        return self.owner._parameters.items()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (dict(self),)  # a copy of the model is not this one


def await_reads(module: nn.Module, mark: Mark) -> None:
    """Makes the next listing of parameters of `module`, which has `mark`, or of a module in it,
    shard the model."""
    for owner in module.modules():
        if type(owner._parameters) is dict and owner._parameters:
            pending = PendingParameters(owner._parameters)
            pending.mark = mark
            pending.owner = owner
            owner._parameters = pending


@contextlib.contextmanager
def unsharded_reads(module: nn.Module) -> Iterator[None]:
    """Within it, reads of parameters of `module` shard no model. If the model is not sharded yet,
    they give plain parameters, and the model is PENDING after."""
    found = [mark for _, mark in marked(module)]
    # A module in it may also be in a marked module outside of it.
    parts = [owner._parameters for owner in module.modules()]
    found += [part.mark for part in parts if isinstance(part, PendingParameters)]
    models = {mark.model for mark in found if mark.model.state in (PENDING, ON_META)}
    for model in models:
        model.state = BUILDING
    for owner in module.modules():
        for name, shown in dict.items(owner._parameters):
            plain = getattr(shown, "_fsdp_plain", None)  # if `shown` is a DTensor of `show_on_meta`
            if plain is not None:
                plain.requires_grad = shown.requires_grad  # type: ignore[union-attr]
                owner._parameters[name] = plain
    try:
        yield
    finally:
        for model in models:
            model.state = PENDING if model.engine is None else BUILT


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


def names_on_meta(module: nn.Module) -> list[str]:
    """The names of parameters that have no memory; shards no model."""
    with unsharded_reads(module):
        return [name for name, param in module.named_parameters() if param.is_meta]


def engine_of(module: Any, runs: bool = False) -> UserLoopEngine:
    """The engine of the model of `module`; shards the model first, if that has not happened.

    runs: the caller is about to run a forward. RuntimeError if parameters are on the meta device,
        when that is the first use of the model.
    """
    model = mark_on(module).model
    if model.engine is None:
        root = root_of(module)
        unfilled = names_on_meta(root) if runs else []
        if unfilled:
            raise RuntimeError(
                f"{SUBJECT}: {len(unfilled)} parameters are still on the meta device: "
                f"{unfilled[:4]}. Load a state dict, or call to_empty and initialize them, before "
                "the first forward"
            )
        _build(root)
    assert model.engine is not None
    if runs:
        announce(root_of(module), model.engine)
    return model.engine


@for_training()
def show_on_meta(module: Any) -> bool:
    """Shows DTensors without memory in place of the model's parameters, if the model is not sharded
    yet and all parameters that it will shard are on the meta device.

    Returns True if the model shows such DTensors now. They have torch's even split of rows: the
    final rows are known only when all units are. Sharding turns these same objects into the sharded
    parameters, so an optimizer may have them already. `unsharded_reads` puts the plain parameters
    back; the next call then shows the same DTensors again.
    """
    root = root_of(module)
    model = mark_on(root).model
    if model.state is not PENDING:
        return model.state is ON_META
    with unsharded_reads(root):
        managed = _params_to_shard(root)
    if not managed or not all(one.param.is_meta for one in managed):
        return False
    for one in managed:
        made = _on_meta(one, _domain(root))
        # The DTensor of an earlier call, if there was one: optimizers may have it.
        shown: Any = one.shown_as(nn.Parameter(made, one.param.requires_grad))
        shown._fsdp_plain = one.given  # for `unsharded_reads`, which puts it back
        # For `shown_as`, in the next call and in `_build`.
        vars(one.in_module)["_fsdp_shown"] = shown
        for owner, name in one.slots:
            owner._parameters[name] = shown
    model.state = ON_META
    return True


def _on_meta(one: ManagedParam, domain: ShardDomain) -> DTensor:
    """The DTensor without memory that is shown for a parameter on the meta device."""
    mesh = domain.mesh
    placements = [*[Replicate()] * (mesh.ndim - 1), Shard(0)]
    if one.extension is not None:
        rows = rows_of_rank(one.given.detach(), domain.axis.rank, domain.axis.size)
        return dtensor_of_rows(rows, mesh, placements, one.param.shape)
    like = one.param.detach().view(one.param.shape or (1,))  # a scalar is one row
    made = distribute_tensor(like, mesh, placements, src_data_rank=None)
    if one.dtensor is None:
        return made
    return dtensor_over(made._local_tensor, *sharded_place(one.dtensor, mesh, placements))


@for_training()
def _build(root: nn.Module) -> None:
    """Shards the model `root`. Collective.

    Raises:
        ValueError: what cannot be sharded, ranks whose models differ, or options that differ
            between calls.
        CommunicationError, RuntimeError: another rank has failed or is late.
    """
    with unsharded_reads(root):
        # From now on reads shard nothing.
        for module in root.modules():
            if isinstance(module._parameters, PendingParameters):
                module._parameters = dict(module._parameters)
        mark_on(root).model.engine = _engine(root)
        for child, mark in marked(root):
            options = mark.options
            if options.input_dtype is not None:
                cast_inputs_of(child, options.input_dtype)
            if options.policy.output_dtype is not None:
                cast_outputs_of(child, options.policy.output_dtype)
            if mark.divide_factor is not None:
                divide_grads(child, mark.divide_factor)


def divide_grads(module: Any, factor: float) -> None:
    """Divides sums of gradients of the module's unit by `factor`, now or when it is sharded."""
    mark = mark_on(module)
    mark.divide_factor = factor
    engine = mark.model.engine
    if engine is None:
        return
    if mark.unit is not engine.root or module is root_of(module):  # else it has no parameters
        engine.divide_grads(mark.unit.trainable_groups, factor)


def _params_to_shard(
    root: nn.Module, units: Mapping[str, nn.Module] = MappingProxyType({})
) -> list[ManagedParam]:
    """Parameters of `root` and the modules in it that no call ignores, with their units."""
    ignored = {id(param) for _, mark in marked(root) for param in mark.options.ignored}
    found = [one for one in managed_params(root, units) if id(one.param) not in ignored]
    managed = []
    for one in found:
        other = with_extension if is_extended(one.param) else as_managed
        managed.append(other(one))
    return managed


def _domain(root: nn.Module) -> ShardDomain:
    """The domain of the model `root`: the ranks that share it, and the scale of its gradients."""
    mark = mark_on(root)
    options = mark.options
    shard, outer = options.groups
    index = FSDPDistributedIndex(
        shard,
        device_type=options.device_type,
        outer_fsdp_group=outer,
        grad_scale=1.0 / rank_count(options.groups),
    )
    domain = index.domain(DENSE)
    return replace(domain, mesh=options.mesh or domain.mesh)


def _engine(root: nn.Module) -> UserLoopEngine:
    """The engine that shards `root`. Collective. Raises as `_build`."""
    options = [mark.options for _, mark in marked(root)]
    shared = _params_to_shard(root)
    names = {one.fqns[0] for one in shared if one.in_module is one.param and not one.extension}
    problems = _options_that_differ(options)
    problems += module_problems(root, None, None, None, names.__contains__, may_be_frozen=True)
    raise_problems(SUBJECT, problems)
    device = device_of_type(root, mark_on(root).options.device_type)
    move(root.buffers(), device)
    domains = {DENSE: _domain(root)}
    plans = _plans(root)
    config = with_single_rank_domains(_config(root, options), domains)
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
    engine.set_auto_sync(True)
    _set_units(engine, root, plans)
    mark_shards(engine, root, root)
    give_addresses(engine.pairs)
    return engine


def _plans(root: nn.Module) -> list[UnitPlan]:
    """The plans of the units of the model `root`."""
    units = unit_modules(root, lambda child: mark_of(child) is not None)
    look_ups = {nn.Embedding}
    for child in units.values():
        # The class of a marked module is a subclass of its own one.
        if isinstance(child, nn.Embedding) and type(child).forward is nn.Embedding.forward:
            look_ups.add(type(child))
    entries = []
    for entry in _params_to_shard(root, units):
        policy = mark_on(units.get(entry.unit, root)).options.policy
        dtype = policy.param_dtype
        if entry.extension is not None:
            entry.extension.policy = policy
        entries.append(replace(entry, format=format_of(entry), compute_dtype=dtype))
    return _joined_by_call(partition(units, entries, units_that_look_up(units, look_ups)))


def _set_units(engine: UserLoopEngine, root: nn.Module, plans: Sequence[UnitPlan]) -> None:
    """Sets the unit of each mark. Parameters of units whose weights stay after forward get the
    function that gathers them."""
    for _, mark in marked(root):
        mark.unit = engine.root
    for unit, plan in zip(engine.units, plans, strict=True):
        for module in plan.modules:
            mark_on(module).unit = unit
        if plan.strategy is not None:  # its weights stay after forward
            gathers = functools.partial(_gathers_for_read, weakref.ref(engine), unit.ordinal)
            for group in unit.groups:
                for entry in group.managed:
                    entry.in_module._fsdp_reach = gathers  # type: ignore[attr-defined]


def _gathers_for_read(engine: weakref.ref[UserLoopEngine], ordinal: int) -> bool:
    """Gathers a unit, if a forward runs; True if so. For weights that are read without a call of
    their module: by a loss that computes with the weight of an output layer, for example."""
    alive = engine()
    if alive is None or alive.step.running is None:
        return False
    alive.gather.unshard(alive.units[ordinal], prefetches=False)
    return True


def _joined_by_call(plans: Iterable[UnitPlan]) -> list[UnitPlan]:
    """`plans`, those of the modules of one call joined to one. Where the call says that weights
    stay after forward, the plan gets the strategy that does this."""
    found: dict[int, UnitPlan] = {}
    for plan in plans:
        call = id(plan)  # the root's plan is no call's, and stays alone
        if plan.module is not None:
            options = mark_on(plan.module).options
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
    """The engine's configuration.

    Gradients accumulate in bfloat16 if all parameters have it, as under FSDP2, else in float32.
    They are sent in `reduce_dtype`. Without one they are sent in bfloat16 if all modules compute in
    it, and otherwise as they accumulate; so too for float16, which the engine does not send.
    """
    own = trained_dtype(root)
    first = options[0]
    wire = first.policy.reduce_dtype
    computes = {one.policy.param_dtype or own for one in options}
    if wire is None and computes == {torch.bfloat16}:
        wire = torch.bfloat16
    elif wire == torch.float16:
        wire = None
    return EngineConfig(
        strategy=STRATEGIES["optim_grads_params"],
        policy=Policy(main_params_dtype=None, main_grads_dtype=own, grad_comm_dtype=wire),
        offload=first.offload,
        even_rows=True,
    )
