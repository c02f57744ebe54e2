"""The model that modules of `fully_shard` make: their marks, and the engine that shards it."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed import _state_dict_utils
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from ..build.building import build_engine, with_single_rank_domains
from ..build.materialize import device_of_type, move, values_come_later
from ..core.config import STRATEGIES, EngineConfig
from ..core.config import MixedPrecisionPolicy as Policy
from ..core.distributed_index import FSDPDistributedIndex
from ..core.dtensor.uneven import Chunks, OwnRows, UnevenDTensor
from ..core.engine.partition import (
    ManagedParam,
    UnitPlan,
    managed_params,
    only_looks_up,
    partition,
    unit_modules,
)
from ..core.problems import raise_problems
from ..core.topology import DENSE, ShardDomain
from ..plan.module_problems import module_problems
from ..plan.unit_grouping import joined
from ..quantized import TransformerEngineParams, format_of
from .building import trained_dtype
from .casts import cast_inputs_of, cast_outputs_of
from .mesh import Groups, rank_count
from .user_loop import UserLoopEngine, mark_shards

SUBJECT, MARK = "fully_shard", "_fsdp_adapter_mark"
PENDING, ON_META, BUILDING, BUILT = "pending", "on the meta device", "being built", "built"


@dataclass(frozen=True)
class Options:
    """The arguments of one call of `fully_shard`. groups: of the shard axis, and of the replicas;
    mesh: of parameters, if the call has one; device_type: of the devices that have the shards."""

    groups: Groups
    mesh: DeviceMesh | None
    reshards: bool
    policy: MixedPrecisionPolicy
    offload: bool
    ignored: frozenset[nn.Parameter]
    device_type: str

    def __post_init__(self) -> None:
        Policy(compute_dtype=self.policy.param_dtype)  # ValueError for a dtype that it has not

    @property
    def input_dtype(self) -> torch.dtype | None:
        """The dtype to which inputs are cast; None for no casts."""
        return self.policy.param_dtype if self.policy.cast_forward_inputs else None

    def of_the_model(self) -> dict[str, Any]:
        """The options that are the same for all modules of a model."""
        return {
            "mesh": self.groups, "mp_policy.reduce_dtype": self.policy.reduce_dtype,
            "offload_policy": self.offload,
        }  # fmt: skip


@dataclass(eq=False)
class Model:
    """The modules that are sharded together: the outermost marked one, the root, with all in it.

    Attributes:
        root: a reference to that, which does not keep it alive.
        state: PENDING until it is sharded; ON_META while its parameters are DTensors without
            memory.
        engine: once it is sharded.
        divide_factor: what sums of gradients are divided by; None for the number of ranks.
    """

    root: weakref.ref[nn.Module]
    state: str = PENDING
    engine: UserLoopEngine | None = None
    divide_factor: float | None = None


@dataclass
class Mark:
    """The mark of a module that `fully_shard` was called with.

    Attributes:
        options: those of its call, which it shares with no other call's modules.
        model: of the outermost marked module around it.
        unit: the module's unit, once the model is sharded.
    """

    options: Options
    model: Model
    unit: Any = None


class PendingParameters(dict[str, Any]):
    """`_parameters` of a module in a model that is to be sharded. `items`, which `parameters()` of
    a module around the model calls, shards the model first; reads by name do not."""

    mark: Mark
    owner: nn.Module

    def items(self) -> Any:
        if self.mark.model.state is not PENDING:
            return super().items()
        root: Any = self.mark.model.root()
        if not shows_meta(root):
            _build(root)
        return self.owner._parameters.items()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (dict(self),)  # a copy of the model is not this one


def await_reads(module: nn.Module, mark: Mark) -> None:
    """Makes reads of all parameters of a module in `module`, which has `mark`, shard the model."""
    for owner in module.modules():
        if type(owner._parameters) is dict and owner._parameters:
            pending = PendingParameters(owner._parameters)
            pending.mark, pending.owner = mark, owner
            owner._parameters = pending


@contextlib.contextmanager
def unsharded_reads(module: nn.Module) -> Iterator[None]:
    """Within it, reads of parameters of `module` shard no model, and give plain parameters if it is
    not sharded yet."""
    models = {mark.model for _, mark in marked(module) if mark.model.state in (PENDING, ON_META)}
    for model in models:
        model.state = BUILDING
    for owner in module.modules():
        for name, shown in dict.items(owner._parameters):
            plain = getattr(shown, "_fsdp_plain", None)
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
    found = ((child, mark_of(child)) for child in module.modules())
    return [(child, mark) for child, mark in found if mark is not None]


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
    """The engine of the model; shards the model first, if that has not happened. `runs`: for a
    forward. RuntimeError if parameters have no values for it."""
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
    return model.engine


def shows_meta(module: Any) -> bool:
    """True if the model is all on the meta device and waits for values: its parameters are then
    DTensors there, which torch's own, even split has cut. They become the sharded parameters, whose
    rows follow from all units of the model, when that is sharded."""
    root = root_of(module)
    model = mark_on(root).model
    if model.state is not PENDING:
        return model.state is ON_META
    with unsharded_reads(root):
        sharded = _sharded_params(root)
    if not sharded or not all(one.param.is_meta for one in sharded):
        return False
    mesh = _domain(root).mesh
    for one in sharded:
        like = one.param.detach().view(one.param.shape or (1,))
        made = distribute_tensor(
            like, mesh, [*[Replicate()] * (mesh.ndim - 1), Shard(0)], src_data_rank=None
        )
        shown: Any = one.shown_as(nn.Parameter(made, one.param.requires_grad))
        shown._fsdp_plain, vars(one.param)["_fsdp_shown"] = one.param, shown
        for owner, name in one.slots:
            owner._parameters[name] = shown
    model.state = ON_META
    return True


def _build(root: nn.Module) -> None:
    """Shards the model `root`. Collective.

    Raises:
        ValueError: what cannot be sharded, ranks whose models differ, or options that differ
            between calls.
        CommunicationError, RuntimeError: another rank has failed or is late.
    """
    with unsharded_reads(root):
        for module in root.modules():
            if isinstance(module._parameters, PendingParameters):
                module._parameters = dict(module._parameters)
        mark_on(root).model.engine = _engine(root)
        for child, mark in marked(root):
            if mark.options.input_dtype is not None:
                cast_inputs_of(child, mark.options.input_dtype)
            if mark.options.policy.output_dtype is not None:
                cast_outputs_of(child, mark.options.policy.output_dtype)


def _sharded_params(root: nn.Module) -> list[ManagedParam]:
    """Parameters below `root` that no call ignores."""
    ignored = {id(param) for _, mark in marked(root) for param in mark.options.ignored}
    return [one for one in managed_params(root) if id(one.param) not in ignored]


def _domain(root: nn.Module) -> ShardDomain:
    """The ranks that share the model `root`."""
    options, divide_factor = mark_on(root).options, mark_on(root).model.divide_factor
    shard, outer = options.groups
    index = FSDPDistributedIndex(
        shard, device_type=options.device_type, outer_fsdp_group=outer,
        grad_scale=1.0 / (divide_factor or rank_count(options.groups)),
    )  # fmt: skip
    domain = index.domain(DENSE)
    return replace(domain, mesh=options.mesh or domain.mesh)


def _engine(root: nn.Module) -> UserLoopEngine:
    sharded, marks = _sharded_params(root), [mark for _, mark in marked(root)]
    names, ids = {one.fqns[0] for one in sharded}, {id(one.param) for one in sharded}
    raise_problems(SUBJECT, [
        *_options_that_differ(marks),
        *module_problems(root, None, None, None, names.__contains__, True),
    ])  # fmt: skip
    device = device_of_type(root, mark_on(root).options.device_type)
    move(root.buffers(), device)
    domains = {DENSE: _domain(root)}
    units = unit_modules(root, lambda child: mark_of(child) is not None)
    # The class of a marked module is a subclass of its own one.
    look_ups: set[type[nn.Module]] = {nn.Embedding, *(
        type(child) for child in units.values()
        if isinstance(child, nn.Embedding) and type(child).forward is nn.Embedding.forward
    )}  # fmt: skip
    plans = partition(
        root,
        units,
        domain_of=lambda param, fqn: DENSE,
        backward_reads_weights=lambda unit: not only_looks_up(unit, look_ups),
        manages=lambda managed: id(managed.param) in ids,
        format_of=format_of,
        compute_dtype_of=lambda name: mark_on(units.get(name, root)).options.policy.param_dtype,
    )
    plans = _joined_by_call([
        replace(plan, strategy=STRATEGIES["optim_grads"])
        if plan.module is not None and not mark_on(plan.module).options.reshards else plan
        for plan in plans
    ])
    engine = build_engine(
        UserLoopEngine, SUBJECT, root, plans, domains,
        with_single_rank_domains(_config(root, [each.options for each in marks]), domains), device,
        lambda module, parent: values_come_later,
        quantized=TransformerEngineParams(),
    )
    engine.auto_sync = True
    for one in marks:
        one.unit = engine.root
    for unit, plan in zip(engine.units, plans, strict=True):
        for own in plan.modules:
            mark_on(own).unit = unit
        for group in unit.groups if plan.strategy is not None else ():
            for param in group.params:
                param._fsdp_reach = functools.partial(_reached, weakref.ref(engine), unit.ordinal)  # type: ignore[attr-defined]
    _distribute_rows()
    mark_shards(engine, root, root)
    _distinguish(engine)
    return engine


def _distinguish(engine: UserLoopEngine) -> None:
    """Gives each parameter an address of its own: accelerate finds the parameters of an optimizer
    by those of their local tensors, and torch has 0 for all that are empty."""
    for number, pair in enumerate(engine.pairs):
        local = pair.sharded._local_tensor  # type: ignore[attr-defined]
        if local.numel() == 0:
            local.data_ptr = lambda own=-1 - number: own
        pair.sharded.data_ptr = local.data_ptr  # type: ignore[method-assign]


def _reached(engine: weakref.ref[UserLoopEngine], ordinal: int) -> bool:
    """Gathers a unit whose weights stay after forward, when a forward reads them without a call of
    their module: a loss that computes with the weight of an output layer."""
    alive = engine()
    if alive is None or alive.running_root is None:
        return False
    alive.gather.wait_unshard(alive.units[ordinal])
    return True


def _joined_by_call(plans: Iterable[UnitPlan]) -> list[UnitPlan]:
    """`plans`, of which those of modules that one call was given are one."""
    found: dict[int, UnitPlan] = {}
    for plan in plans:
        call = id(plan if plan.module is None else mark_on(plan.module).options)
        found[call] = joined(found[call], plan) if call in found else plan
    return list(found.values())


def _options_that_differ(marks: Sequence[Mark]) -> list[str]:
    first = marks[0].options.of_the_model()
    return [
        f"{name}={value}: another call for this model was given {first[name]}. Give all calls the "
        "same"
        for mark in marks for name, value in mark.options.of_the_model().items()
        if value != first[name]
    ][:1]


def _config(root: nn.Module, options: Sequence[Options]) -> EngineConfig:
    """The engine's configuration. Gradients and optimizer state have the parameters' dtype, as
    under FSDP2, if gradients may have it. Gradients are sent in bfloat16 if it is asked for, or all
    modules compute in it."""
    own = trained_dtype(root)
    computes = {one.policy.param_dtype or own for one in options}
    wire = options[0].policy.reduce_dtype or (
        torch.bfloat16 if computes == {torch.bfloat16} else None
    )
    return EngineConfig(
        strategy=STRATEGIES["optim_grads_params"],
        policy=Policy(
            main_params_dtype=None, main_grads_dtype=own,
            grad_comm_dtype=None if wire == torch.float16 else wire,
        ),
        offload=options[0].offload,
    )  # fmt: skip


@functools.cache
def _distribute_rows() -> None:
    """Makes `set_optimizer_state_dict` cut unsharded tensors into the rows that a rank has of our
    parameters. torch's own function, which still serves all other tensors, cuts evenly."""
    original = _state_dict_utils.distribute_tensor

    @functools.wraps(original)
    def distribute(
        tensor: torch.Tensor, device_mesh: Any = None, placements: Any = None, **options: Any
    ) -> Any:
        # The last one has the rows: those before it cut nothing.
        rows = next((p for p in reversed(placements or ()) if isinstance(p, OwnRows)), None)
        if rows is None:
            return original(tensor, device_mesh, placements, **options)
        rest = tensor.shape[1:]
        box = ((rows.start, *[0] * len(rest)), (rows.size, *rest))
        return UnevenDTensor.over(
            tensor[rows.start : rows.start + rows.size].clone(), device_mesh,
            [Shard(0) if isinstance(one, OwnRows) else one for one in placements],
            tensor.shape, tensor.stride(), Chunks((box,) if rows.size else ()),
        )  # fmt: skip

    _state_dict_utils.distribute_tensor = distribute
