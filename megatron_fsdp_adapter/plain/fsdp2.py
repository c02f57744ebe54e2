"""`fully_shard` with the signature and the habits of torch's FSDP2, on the engine of the wrappers.

    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

A call marks its module. The outermost marked module, the root, is sharded as a whole when its
parameters are first read, or when it first runs; the marked modules in it are its units. Sharding
each module in its own call was rejected: an engine has to know all units to gather the next one
ahead, so that each call around others would build it anew.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _state_dict_utils
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    UnshardHandle,
)
from torch.distributed.tensor import Shard
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_map_only

from ..core.config import STRATEGIES, EngineConfig
from ..core.config import MixedPrecisionPolicy as Policy
from ..core.engine.partition import managed_params, only_looks_up, partition, unit_modules
from ..core.topology import DENSE, FSDPDistributedIndex
from ..dtensor import Chunks, OwnRows, UnevenDTensor
from ..quantized import TransformerEngineParams, format_of
from ..sharding.building import build_engine, with_single_rank_domains
from ..sharding.materialize import target_device, values_come_later
from ..sharding.module_problems import module_problems
from ..sharding.problems import raise_problems
from ..sharding.sharded_module import mark_shard, refuse_conversions, register_state_dict_hooks
from .user_loop import UserLoopEngine

SUBJECT, MARK = "fully_shard", "_fsdp_adapter_mark"
PENDING, BUILDING, BUILT = "pending", "being built", "built"


@dataclass(frozen=True)
class Options:
    """What one call of `fully_shard` was given. groups: of the shard axis, and of the replicas."""

    groups: tuple[dist.ProcessGroup, dist.ProcessGroup | None]
    reshards: bool
    policy: MixedPrecisionPolicy
    offload: bool
    ignored: frozenset[nn.Parameter]

    def of_the_model(self) -> dict[str, Any]:
        """What is the same for all modules of a model."""
        return {
            "mesh": self.groups, "mp_policy.param_dtype": self.policy.param_dtype,
            "mp_policy.reduce_dtype": self.policy.reduce_dtype, "offload_policy": self.offload,
        }  # fmt: skip


class Mark:
    """Of a module that `fully_shard` was called with.

    Attributes:
        around: the marked module around it; itself where there is none.
        state: PENDING until the root is sharded.
        engine, ordinal: once it is, and the number of the module's unit, the root's last.
        holds: whether the module's weights stay unsharded until `reshard`.
        divide_factor: what sums of gradients are divided by; None for the number of ranks.
    """

    def __init__(self, module: nn.Module, options: Options) -> None:
        self.options, self.around = options, weakref.ref(module)
        self.state, self.ordinal = PENDING, -1
        self.engine: UserLoopEngine | None = None
        self.holds = False
        self.divide_factor: float | None = None

    def hold(self, holds: bool) -> None:
        """Keeps the unit's weights from being resharded, or no longer."""
        assert self.engine is not None
        if holds is not self.holds:
            self.holds, unit = holds, self.engine.units[self.ordinal]
            (self.engine.gather.keep if holds else self.engine.gather.let_go)(unit)


def mark_of(module: nn.Module) -> Mark | None:
    """The mark of a module; None if `fully_shard` was not called with it."""
    found: Mark | None = module.__dict__.get(MARK)
    return found


def _marked(module: nn.Module) -> list[tuple[nn.Module, Mark]]:
    found = ((child, mark_of(child)) for child in module.modules())
    return [(child, mark) for child, mark in found if mark is not None]


class ShardedModule(FSDPModule):
    """What a module is after `fully_shard`: an `FSDPModule` of torch's, whose methods act on our
    engine. A method that changes the speed alone, and has no counterpart, does nothing: gathers
    follow the order of the pass before, reductions sum, unused parameters are reduced as zeros."""

    _orig_cls_mro_index = 3  # FSDP<Original>, ShardedModule, FSDPModule, Original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module; shards the root first, if that has not happened."""
        if _mark(self).state is PENDING:
            _refuse_optimizers_of_before(_engine_of(self))
        return super().__call__(*args, **kwargs)  # type: ignore[misc]

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """The same DTensors at any time, except while a forward runs or waits for its backward, or
        weights are held by `unshard`."""
        if _mark(self).state is not BUILDING:
            engine = _engine_of(self)
            if not engine.gather.keeps_any:
                engine.show_between_passes()
        return super().named_parameters(*args, **kwargs)  # type: ignore[misc,no-any-return]

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """DTensors of the main weights, and buffers."""
        _engine_of(self)
        return super().state_dict(*args, **kwargs)  # type: ignore[misc]

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Loads DTensors, sharded in any way, or whole tensors. With `assign` too, values are
        copied: parameters, which optimizers have, stay what they are."""
        _engine_of(self)
        return super().load_state_dict(state_dict, strict)  # type: ignore[misc]

    def to_empty(self, *, device: Any, recurse: bool = True) -> Any:
        """Gives parameters and buffers on the meta device memory. Sharded parameters have theirs,
        in which each element is NaN until it is loaded or written."""
        if _mark(self).state is PENDING:
            return super().to_empty(device=device, recurse=recurse)  # type: ignore[misc]
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        return super(FSDPModule, self)._apply(fn, recurse)  # type: ignore[misc]

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gathers the module's weights and holds them until `reshard`; parameters of all modules
        are the unsharded ones meanwhile. Not recursive. With `async_op` the handle waits."""
        mark, engine = _mark(self), _engine_of(self)
        unit = engine.units[mark.ordinal]
        engine.to_unsharded()
        mark.hold(True)
        engine.gather.start(unit)
        handle = _Handle(lambda: engine.gather.require(unit))
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Gives gathered weights back; parameters are DTensors again between passes."""
        mark, engine = _mark(self), _engine_of(self)
        mark.hold(False)
        engine.gather.release(engine.units[mark.ordinal])
        if not engine.gather.keeps_any:
            engine.show_between_passes()

    def reset_iter_state(self) -> None:
        """Forgets a forward or backward that raised, with its gradients."""
        _engine_of(self).zero_grads()

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Whether the next backwards end a step. Sharded gradients are reduced by each backward,
        as full ones take no memory here. RuntimeError for one module of several."""
        if not recurse and len(_marked(_root(self))) > 1:  # type: ignore[arg-type]
            raise RuntimeError(
                "set_requires_gradient_sync(recurse=False): gradients of all modules of a model "
                "are reduced alike; call it on the root, with recurse=True"
            )
        _engine_of(self).is_last_microbatch = requires_gradient_sync

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Whether `.grad` is complete after the next backward."""
        _engine_of(self).is_last_microbatch = is_last_backward

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether weights that are sharded between passes go after each forward."""
        self._set_holds(not reshard_after_forward, recurse)

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Whether they go after each backward."""
        self._set_holds(not reshard_after_backward, recurse)

    def _set_holds(self, holds: bool, recurse: bool) -> None:
        _engine_of(self)
        for module, mark in _marked(self):  # type: ignore[arg-type]
            if recurse or module is self:
                mark.hold(holds)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divides sums of gradients by `factor` and not by the number of ranks. For all modules of
        a model, before its parameters are read. RuntimeError after that."""
        if _mark(self).state is not PENDING:
            raise RuntimeError(
                f"set_gradient_divide_factor({factor}): the model is sharded already; call it "
                "after fully_shard, before parameters() is called and the model runs"
            )
        for _, mark in _marked(_root(self)):  # type: ignore[arg-type]
            mark.divide_factor = float(factor)

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """`set_gradient_divide_factor`."""
        self.set_gradient_divide_factor(factor)

    def set_custom_all_gather(self, comm: Any) -> None:
        """RuntimeError: gathers are the engine's."""
        raise _no_counterpart("set_custom_all_gather")

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """RuntimeError: reductions are the engine's."""
        raise _no_counterpart("set_custom_reduce_scatter")

    def set_all_reduce_hook(self, hook: Any, *, stream: Any = None) -> None:
        """RuntimeError: nothing runs between the reductions over two axes."""
        raise _no_counterpart("set_all_reduce_hook")

    def _get_fsdp_state(self) -> Any:
        raise _no_counterpart("a function of torch's FSDP2 that reads the state of a module")

    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError(
            f"copy.deepcopy of {type(self).__name__}: its weights are views of flat buffers; copy "
            "state_dict(), and load that into another model"
        )


def _does_nothing(self: Any, *args: Any, **kwargs: Any) -> None:
    """Changes the speed of torch's FSDP2 alone."""


HINTS = (
    "set_requires_all_reduce", "set_modules_to_forward_prefetch",
    "set_modules_to_backward_prefetch", "set_force_sum_reduction_for_comms",
    "set_reduce_scatter_unused_params", "set_reduce_scatter_max_input_buffers",
    "set_separate_reduce_scatter_group", "set_unshard_in_backward", "set_post_optim_event",
    "set_allocate_memory_from_process_group_for_comm", "set_symm_mem_for_comm",
    "_set_unshard_async_op",
)  # fmt: skip
for _name in HINTS:
    setattr(ShardedModule, _name, _does_nothing)


class _Handle(UnshardHandle):
    def __init__(self, wait: Callable[[], None]) -> None:
        self._wait = wait

    def wait(self) -> None:
        self._wait()


def _no_counterpart(what: str) -> RuntimeError:
    return RuntimeError(
        f"{what}: megatron_fsdp_adapter's fully_shard has no counterpart; leave the call out, or "
        "use torch's fully_shard for this model"
    )


@functools.cache
def _sharded_class(original: type) -> type:
    return type(f"FSDP{original.__name__}", (ShardedModule, original), {})


def fully_shard(
    module: Any,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008, frozen
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008, frozen
    ignored_params: Iterable[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
) -> Any:
    """Makes `module` a unit of a sharded model, in place, as torch's function of this name.

    Args:
        module: a module, or a list of modules, each of which becomes a unit. To be called for the
            modules inside of others first, for the model last.
        mesh: the ranks to shard over, by default all: of one dim, or (replicas, shards). A last
            dim of one rank that is not named for shards ("tp", say) is no shard axis.
        reshard_after_forward: whether weights go after forward. None: True, but for the root,
            whose weights stay through a pass. A number of ranks, to which torch's would reshard
            them, is True.
        shard_placement_fn: asked for each parameter; rows of dim 0 are cut, whatever it says of
            padding. ValueError for another dim.
        mp_policy: `param_dtype` and `reduce_dtype` are those of the model, equal in all calls.
        offload_policy: with `CPUOffloadPolicy` main weights are in host memory, and
            `fully_shard_optimizer` steps on the device, unit by unit.
        ignored_params: are left as they are.
        dp_mesh_dims: which dims of a larger mesh are shards and replicas.

    Returns:
        `module`, whose class is a subclass of its own one and of torch's `FSDPModule`.

    Raises:
        ValueError: what cannot be sharded, in this call or, for the model, when it is sharded.
    """
    modules = list(module) if isinstance(module, (list, tuple)) else [module]
    options = Options(
        _groups(mesh, dp_mesh_dims), reshard_after_forward is not False, mp_policy,
        isinstance(offload_policy, CPUOffloadPolicy), frozenset(ignored_params or ()),
    )  # fmt: skip
    for one in modules:
        _check_call(one, shard_placement_fn)
    for one in modules:
        one.__dict__[MARK] = Mark(one, options)
        one.__class__ = _sharded_class(type(one))  # type: ignore[arg-type]
        for _, mark in _marked(one):
            mark.around = weakref.ref(one)
    return module


def _check_call(module: nn.Module, placement_of: Callable[[nn.Parameter], Any] | None) -> None:
    """ValueError for a module that `fully_shard` cannot be called with."""
    found = []
    if mark_of(module) is not None:
        found.append(f"module={type(module).__name__}: fully_shard was called with it before")
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        found.append(
            f"module={type(module).__name__}: it has no forward; call fully_shard for its entries"
        )
    if any(mark.state is not PENDING for _, mark in _marked(module)):
        found.append(
            f"module={type(module).__name__}: modules in it are sharded already, as their "
            "parameters were read, or they have run; call fully_shard for the model before that"
        )
    dims = {
        getattr(getattr(said, "placement", said), "dim", 0)
        for said in map(placement_of, module.parameters()) if said is not None
    } if placement_of is not None and not found else set()  # fmt: skip
    if dims - {0}:
        found.append(
            f"shard_placement_fn: Shard({max(dims)}): rows of dim 0 are cut; return Shard(0) or "
            "None"
        )
    raise_problems(SUBJECT, found)


def _groups(
    mesh: DeviceMesh | None, dims: Any
) -> tuple[dist.ProcessGroup, dist.ProcessGroup | None]:
    """The group of the shard axis, and that of the replicas."""
    if mesh is None:
        return dist.distributed_c10d._get_default_group(), None
    if dims is not None:
        axes = [_joined(mesh, names) for names in (dims.shard_names, dims.replicate_names)]
        shard, outer = axes
        if shard is None:
            raise ValueError(
                f"dp_mesh_dims={dims}: it names no dim for shards; name one, or use DDP"
            )
        return shard, outer
    names = mesh.mesh_dim_names or ("",) * mesh.ndim
    if mesh.ndim == 2 and mesh.size(1) == 1 and "shard" not in names[1]:
        return mesh.get_group(0), None
    if mesh.ndim > 2:
        raise ValueError(
            f"mesh={mesh}: it has {mesh.ndim} dims; pass one (shards), two (replicas, shards), or "
            "dp_mesh_dims"
        )
    return mesh.get_group(mesh.ndim - 1), mesh.get_group(0) if mesh.ndim == 2 else None


def _joined(mesh: DeviceMesh, names: Sequence[str]) -> dist.ProcessGroup | None:
    if not names:
        return None
    return (mesh[names[0]] if len(names) == 1 else mesh[tuple(names)]._flatten()).get_group()


# The root is sharded.


def _mark(module: Any) -> Mark:
    found = mark_of(module)
    assert found is not None
    return found


def _root(module: Any) -> nn.Module:
    """The outermost marked module around `module`."""
    around = _mark(module).around()
    return module if around is None else around


def _engine_of(module: Any) -> UserLoopEngine:
    """The engine of the model, which is sharded if it was not."""
    mark = _mark(module)
    if mark.engine is None:
        _build(_root(module))
    assert mark.engine is not None
    return mark.engine


def _build(root: nn.Module) -> None:
    """Shards the model `root`. Collective.

    Raises:
        ValueError: what cannot be sharded, ranks whose models differ, or options that differ
            between calls.
        CommunicationError, RuntimeError: another rank has failed or is late.
    """
    marked, mark = _marked(root), _mark(root)
    for _, each in marked:
        each.state = BUILDING
    try:
        engine = _engine(root, [each for _, each in marked], mark)
    except BaseException:
        for _, each in marked:
            each.state = PENDING
        raise
    numbers = {unit.name: unit.ordinal for unit in engine.units}
    names = {id(child): name for name, child in root.named_modules()}
    for child, each in marked:
        each.engine, each.state = engine, BUILT
        each.ordinal = numbers.get(names[id(child)], engine.root.ordinal)
        _register_casts(child, each.options.policy)


def _engine(root: nn.Module, marks: Sequence[Mark], mark: Mark) -> UserLoopEngine:
    ignored = {id(param) for each in marks for param in each.options.ignored}
    names = {one.fqns[0] for one in managed_params(root) if id(one.param) in ignored}
    raise_problems(SUBJECT, [
        *_options_that_differ(marks),
        *module_problems(root, None, None, None, lambda name: name not in names),
    ])  # fmt: skip
    config = _config(root, mark.options)
    (shard, outer), device = mark.options.groups, target_device(root, None)
    ranks = dist.get_world_size(shard) * (1 if outer is None else dist.get_world_size(outer))
    index = FSDPDistributedIndex(
        shard, device_type=device.type, grad_scale=1.0 / (mark.divide_factor or ranks),
        outer_fsdp_group=outer,
    )  # fmt: skip
    units = unit_modules(root, lambda child: mark_of(child) is not None)
    plans = partition(
        root,
        units,
        domain_of=lambda param, fqn: DENSE,
        backward_reads_weights=lambda unit: not only_looks_up(
            unit, {nn.Embedding, _sharded_class(nn.Embedding)}
        ),
        manages=lambda managed: id(managed.param) not in ignored,
        format_of=format_of,
        compute_dtype=config.policy.compute_dtype,
    )
    plans = [
        replace(plan, strategy=STRATEGIES["optim_grads"])
        if plan.module is not None and not _mark(plan.module).options.reshards else plan
        for plan in plans
    ]
    engine = build_engine(
        UserLoopEngine, SUBJECT, root, plans, dict(index.domains),
        with_single_rank_domains(config, index.domains), device,
        lambda module, parent: values_come_later,
        quantized=TransformerEngineParams(),
    )
    engine.auto_sync = True
    _distribute_rows()
    for pair in engine.pairs:
        mark_shard(pair)
        pair.sharded._fsdp_engine = weakref.ref(engine)  # type: ignore[attr-defined]
    register_state_dict_hooks(root, engine)
    refuse_conversions(root, engine)
    return engine


def _options_that_differ(marks: Sequence[Mark]) -> list[str]:
    first = marks[0].options.of_the_model()
    return [
        f"{name}={value}: another call for this model was given {first[name]}; give all calls the "
        "same"
        for mark in marks for name, value in mark.options.of_the_model().items()
        if value != first[name]
    ][:1]


def _config(root: nn.Module, options: Options) -> EngineConfig:
    """Parameters, gradients and optimizer state have the dtype that parameters have, as under
    FSDP2, where that is one that gradients may have."""
    compute, wire = options.policy.param_dtype, options.policy.reduce_dtype
    dtypes = {param.dtype for param in root.parameters() if param.requires_grad}
    own = dtypes.pop() if dtypes == {torch.bfloat16} else torch.float32
    wire = wire or (torch.bfloat16 if (compute or own) == torch.bfloat16 else None)
    return EngineConfig(
        strategy=STRATEGIES["optim_grads_params"],
        policy=Policy(
            main_params_dtype=None, main_grads_dtype=own,
            grad_comm_dtype=None if wire == torch.float16 else wire, compute_dtype=compute,
        ),
        offload=options.offload,
    )  # fmt: skip


def _distribute_rows() -> None:
    """Has `set_optimizer_state_dict` cut whole tensors into the rows that each rank has: torch's
    own function cuts evenly, whatever placements say. It goes on doing so for all other tensors."""
    original = _state_dict_utils.distribute_tensor
    if getattr(original, "_knows_own_rows", False):
        return

    @functools.wraps(original)
    def distribute(
        tensor: torch.Tensor, device_mesh: Any = None, placements: Any = None, **options: Any
    ) -> Any:
        if not any(isinstance(one, OwnRows) for one in placements or ()):
            return original(tensor, device_mesh, placements, **options)
        start, size, rest = 0, tensor.shape[0], tensor.shape[1:]
        for placement in placements:
            if isinstance(placement, OwnRows):
                start, size = start + placement.start, placement.size
        box = ((start, *[0] * len(rest)), (size, *rest))
        return UnevenDTensor.over(
            tensor[start : start + size].clone(), device_mesh,
            [Shard(0) if isinstance(one, OwnRows) else one for one in placements],
            tensor.shape, tensor.stride(), Chunks((box,) if size else ()),
        )  # fmt: skip

    distribute._knows_own_rows = True  # type: ignore[attr-defined]
    _state_dict_utils.distribute_tensor = distribute


def _register_casts(module: nn.Module, policy: MixedPrecisionPolicy) -> None:
    if policy.param_dtype is not None and policy.cast_forward_inputs:
        cast = functools.partial(cast_inputs, policy.param_dtype)
        module.register_forward_pre_hook(cast, prepend=True, with_kwargs=True)
    if policy.output_dtype is not None:
        module.register_forward_hook(functools.partial(_cast_output, policy.output_dtype))


def cast_floats(dtype: torch.dtype, values: Any) -> Any:
    """`values`, of which floating-point tensors are in `dtype`, inside of any containers."""
    return tree_map_only(
        torch.Tensor, lambda value: value.to(dtype) if value.is_floating_point() else value, values
    )


def cast_inputs(dtype: torch.dtype, module: nn.Module, args: Any, kwargs: Any) -> Any:
    """`cast_floats` of a module's inputs, as a hook in front of its forward."""
    return cast_floats(dtype, (args, kwargs))


def _cast_output(dtype: torch.dtype, module: nn.Module, args: Any, output: Any) -> Any:
    return cast_floats(dtype, output)


def _refuse_optimizers_of_before(engine: UserLoopEngine) -> None:
    """Makes a step of an optimizer that has parameters of before they were sharded raise: it would
    find no gradients, and train nothing."""

    def check(optimizer: Any, *_: Any) -> None:
        params = (param for group in optimizer.param_groups for param in group["params"])
        if any(hasattr(param, "_fsdp_label") for param in params):
            raise RuntimeError(
                f"{type(optimizer).__name__}: it has parameters of a model from before fully_shard "
                "had sharded them; make the optimizer from parameters() of the module that "
                "fully_shard was called with last"
            )

    handle = register_optimizer_step_pre_hook(check)
    weakref.finalize(engine, handle.remove)
