"""`fully_shard` with the signature and the habits of torch's FSDP2, on the engine of the wrappers.

A call shards the parameters of its module at once, into DTensors of torch's, and marks the module.
An engine is made when the outermost marked module, the root, first runs: it must know all units, to
gather the next one ahead. The marked modules in the root are its units.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, RegistryItem
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    UnshardHandle,
)

from ..build.replicas import check_manager
from ..core.comm.managed import Manages
from ..core.engine.partition import managed_params
from ..core.engine.step import RootCall
from ..state.not_copyable import NotCopyable
from .call_options import FP32_SUMS, FullyShardOptions, resharding
from .call_problems import check_call
from .casts import cast
from .feedback import note_sharding
from .fsdp2_model import (
    SUBJECT,
    Mark,
    Model,
    OwnPlaces,
    UnitSetting,
    divide_grads,
    engine_of,
    mark_as_root,
    mark_on,
    marked,
    root_of,
    set_on,
    shard_now,
)
from .mesh import (
    data_parallel_mesh,
    device_type_of,
    groups_by_position,
    whole_mesh,
)
from .sharded_params import keeping_params, show_tied


class FSDP2Module(NotCopyable, FSDPModule):
    """The class of a module after `fully_shard`: a subclass of torch's `FSDPModule`, whose methods
    act on this package's engine. The methods in `HINTS`, which only tune the speed of torch's, do
    nothing: here gathers follow the order of the previous pass, and reductions are sums."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Makes an object of the module's own class, which is not sharded. `nn.Sequential` makes a
        slice of itself by a call of its class."""
        # The module's own class follows FSDPModule in the order of `_sharded_class`.
        original: Any = cls.__mro__[cls.__mro__.index(FSDPModule) + 1]
        return original(*args, **kwargs)

    @torch.compiler.disable(recursive=False)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module. The first call makes the model's engine. torch.compile leaves this call
        out of its graphs, and compiles the call of the module's own class."""
        engine_of(self)
        return super().__call__(*args, **kwargs)  # type: ignore[misc]

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Names and parameters: the same DTensors each time, but for unsharded parameters of the
        modules of which a forward or backward runs, or of which `unshard` holds weights."""
        model = mark_on(self).model
        if model.engine is None and model.waits:
            engine_of(self)
        if model.engine is not None:
            model.engine.show_between_passes()
        return super().named_parameters(*args, **kwargs)  # type: ignore[misc,no-any-return]

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Loads DTensors, sharded in any way, or whole tensors. Once the model has run, `assign`
        has no effect: values are copied, because the engine has the parameters. Before it, they are
        given to the parameters that are there, which optimizers may have."""
        assign = assign and mark_on(self).model.engine is None
        with keeping_params(self):
            return super().load_state_dict(state_dict, strict, assign)  # type: ignore[misc]

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        # Skips the `_apply` of torch's FSDPModule, which reads the state of torch's engine.
        return super(FSDPModule, self)._apply(fn, recurse)  # type: ignore[misc]

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gathers the module's weights; not those of modules in it. Holds them, and has the module
        show unsharded parameters, until `reshard`, or until its next forward ends. With `async_op`
        it returns at once, and the handle's `wait` does that."""
        engine = engine_of(self)
        unit = mark_on(self).unit
        engine.hold_unsharded(unit)
        handle = UnshardHandle()
        handle.wait = functools.partial(engine.show_unsharded, unit)  # type: ignore[method-assign]
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Releases what `unshard` holds: the module's parameters are DTensors again."""
        engine_of(self).release(mark_on(self).unit)

    def reset_iter_state(self) -> None:
        """Forgets a forward or backward that raised, with its gradients, and all sums that are not
        in `.grad`. What earlier backwards have left in `.grad` stays, unless that one has added to
        it."""
        engine = mark_on(self).model.engine
        if engine is not None:
            engine.reset()

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Sets whether the next backwards reduce gradients of the module, also over replicas.
        Otherwise each rank adds them up unsharded, in the dtype in which they are sent. `.grad` has
        them after a backward that reduces."""
        deferred = not requires_gradient_sync
        set_on(self, recurse, lambda engine, unit: unit.defer(deferred))
        set_on(self, recurse, lambda engine, unit: unit.withhold(deferred))
        self._end_step_if_whole(requires_gradient_sync, recurse)

    def _end_step_if_whole(self, ends: bool, recurse: bool) -> None:
        """Sets whether the next backward ends a step, if this is the whole model."""
        module: Any = self
        count = len(marked(module)) if recurse else 1
        if count == len(marked(root_of(self))):
            set_on(self, False, lambda engine, unit: engine.microbatch(last=ends))

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Sets whether the next backwards sum gradients of the module over replicas. Otherwise each
        replica adds up its own shards, and `.grad` has them after a backward that sums."""
        withheld = not requires_all_reduce
        set_on(self, recurse, lambda engine, unit: unit.withhold(withheld))
        if mark_on(self).options.groups[1] is not None:
            self._end_step_if_whole(requires_all_reduce, recurse)

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Sets whether weights that are sharded between passes are resharded after each forward,
        and after each backward of a step but the last."""
        stays = not reshard_after_forward

        def setting(engine: Any, unit: Any) -> None:
            unit.stay(stays)
            unit.stay_shown(forward=stays)
            engine.gather.keep_over(unit, {})

        set_on(self, recurse, setting)

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Does what `set_reshard_after_forward` does, as one setting is for both, but for the
        parameters that modules show."""
        stays = not reshard_after_backward
        set_on(self, recurse, lambda engine, unit: unit.stay(stays))
        set_on(self, recurse, lambda engine, unit: unit.stay_shown(backward=stays))

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Sets the gradient of parameters that no rank's loss reads: zeros if True, else None."""
        zeroed = reduce_scatter_unused_params
        set_on(self, recurse, lambda engine, unit: engine.zero_absent_grads(unit.groups, zeroed))

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divides sums of the module's gradients by `factor` from now on, and not by the number of
        ranks; not those of modules in it that `fully_shard` was called with."""
        divide_grads(self, float(factor))

    def set_all_reduce_hook(
        self, hook: Callable[[torch.Tensor], None], *, stream: Any = None
    ) -> None:
        """Registers `hook`, which changes reduced gradients of this module in place.

        It gets means over the ranks, before they are added to `.grad`: after each reduction, or
        with replicas once a step, after the reduction over these. It runs in the stream of
        reductions, or in `stream`. ValueError for a `stream` with replicas, and for sums in float32
        without replicas.
        """
        mark = mark_on(self)
        if mark.options.fp32_sums and not mark.options.domain.has_replicas:
            raise ValueError(
                f"set_all_reduce_hook: the module was sharded with {FP32_SUMS}=True, which adds "
                "sums to .grad as it makes them. Leave that argument out for this module, or "
                "change .grad after the backward"
            )
        if stream is not None and mark.options.domain.has_replicas:
            raise ValueError(
                f"stream={stream}: there are replicas, and the hook runs in the stream of the "
                "reduction over them. Leave stream out"
            )
        if stream is not None:
            hook = functools.partial(_run_in, stream, hook)
        set_on(self, False, _changing_reduced_by(hook))

    def set_custom_all_gather(self, comm: Any) -> None:
        """RuntimeError: the engine gathers and reduces by its own collectives."""
        raise RuntimeError(
            "set_custom_all_gather, set_custom_reduce_scatter: megatron_fsdp_adapter's fully_shard "
            "has no counterpart. Leave the call out, or use torch's fully_shard for this model"
        )

    set_custom_reduce_scatter = set_custom_all_gather
    set_reduce_scatter_divide_factor = set_gradient_divide_factor

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """RuntimeError for `keep=True`: units take gathered weights from memory that they share."""
        if keep:
            raise RuntimeError(
                "set_keep_unsharded_storage(True): megatron_fsdp_adapter's fully_shard gathers "
                "weights into memory that comes and goes. Leave the call out, pass "
                "reshard_after_forward=False, or use torch's fully_shard for this model"
            )

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """RuntimeError for `enabled=True`: each backward ends by itself."""
        if enabled:
            self.finalize_backward()

    def finalize_backward(self, *, async_op: bool = False) -> Any:
        """RuntimeError: each backward ends by itself."""
        raise RuntimeError(
            "set_manual_backward_finalization(True), finalize_backward: megatron_fsdp_adapter's "
            "fully_shard ends each backward by itself. Leave the calls out, and defer reductions "
            "by set_requires_gradient_sync(False), or use torch's fully_shard for this model"
        )

    # Names that functions of torch read of a module's state. `register_fsdp_forward_method` calls
    # the two hooks around a method. `share_comm_ctx` looks for streams, which the engine has.
    _comm_ctx = None
    _fsdp_param_groups = ()
    _fsdp_param_group = None  # torch 2.11

    def _get_fsdp_state(self) -> Any:
        return self

    def _pre_forward(self, module: Any, args: Any, kwargs: Any) -> Any:
        engine = engine_of(self)
        mark = mark_on(self)
        args, kwargs = cast(mark.options.input_dtype, (args, kwargs))
        if mark.unit is not engine.root:
            return engine.pre_forward(mark.unit, args, kwargs)
        engine.root_pre_forward(RootCall.METHOD)
        return args, kwargs

    def _post_forward(self, module: Any, args: Any, output: Any) -> Any:
        engine = engine_of(self)
        mark = mark_on(self)
        if mark.unit is not engine.root:
            engine.post_forward(mark.unit, output, (args, {}))
        else:
            engine.root_post_forward(RootCall.METHOD, output)
        return cast(mark.options.policy.output_dtype, output)


def _changing_reduced_by(hook: Callable[[torch.Tensor], None]) -> UnitSetting:
    """Has `hook` change reduced gradients of a unit."""

    def setting(engine: Any, unit: Any) -> None:
        for group in unit.groups:
            group.change_reduced_by(hook)

    return setting


def _run_in(stream: Any, hook: Callable[[torch.Tensor], None], output: torch.Tensor) -> None:
    """Runs `hook` in `stream`: after the earlier work of the current stream, before its later."""
    device = torch.get_device_module(output.device)
    current = device.current_stream()
    stream.wait_stream(current)
    with device.stream(stream):
        hook(output)
    current.wait_stream(stream)


def _does_nothing(self: Any, *args: Any, **kwargs: Any) -> None:
    """No-op: the method only tunes the speed of torch's FSDP2."""


HINTS = (
    "set_modules_to_forward_prefetch", "set_modules_to_backward_prefetch", "set_is_last_backward",
    "set_force_sum_reduction_for_comms",
    "set_reduce_scatter_max_input_buffers",
    "set_separate_reduce_scatter_group", "set_unshard_in_backward", "set_post_optim_event",
    "set_allocate_memory_from_process_group_for_comm", "set_symm_mem_for_comm",
    "_set_unshard_async_op",
)  # fmt: skip
for _name in HINTS:
    setattr(FSDP2Module, _name, _does_nothing)


@functools.cache
def _sharded_class(original: type) -> type:
    return type(f"FSDP{original.__name__}", (FSDP2Module, original), {})


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
    reduce_scatter_with_fp32_accumulation: bool = False,
    elastic: Manages | None = None,
) -> Any:
    """Shards the parameters of `module` over ranks, in place, as torch's function of this name.

    Examples:
        >>> model = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 4))
        >>> _ = [fully_shard(layer) for layer in model], fully_shard(model)
        >>> model[1].weight.shape, model[1].weight.to_local().shape  # on each of two ranks
        (torch.Size([4, 6]), torch.Size([2, 6]))

    Args:
        module: a module, or a list of modules, which become one unit: their weights are gathered
            together. Call `fully_shard` for inner modules first, and for the model last.
        mesh: the ranks to shard over. Parameters and buffers move to its type of device. By default
            it has all ranks, and the accelerator if there is one. A mesh of two dims is read by
            position: (replicas, shards).
        reshard_after_forward: False keeps weights gathered from forward to backward. A number keeps
            them sharded over that many neighboring ranks until then. Any other value shards them
            over all ranks again. The root's weights stay gathered through a pass in any case.
        shard_placement_fn: a function of a parameter, which returns torch's Shard of the dim to
            split, or torch's ShardPlacementResult with a mesh too. None splits dim 0. The number of
            ranks must divide a dim other than 0.
        mp_policy: torch's policy: dtypes of compute, of sent gradients and of outputs.
        offload_policy: `CPUOffloadPolicy` puts parameters and gradients into host memory, where the
            optimizer steps. If `fully_shard_optimizer` was called before the first forward, the
            optimizer steps on the device, unit by unit.
        ignored_params: parameters to leave as they are.
        dp_mesh_dims: the dims of a larger mesh that are shards and replicas. Parameters must be
            DTensors over the whole mesh, replicated over these dims.
        reduce_scatter_with_fp32_accumulation: True sums gradients in float32 over ranks, if
            `mp_policy` sends them in bfloat16. torch's function has no such argument.
        elastic: torchft's Manager, the same in all calls. The job is then one of several replicas
            that may die and come back. Gradients are averaged over the replicas of a step. Step
            with `elastic_optimizer`.

    Returns:
        The module, which is now an instance of torch's `FSDPModule` too.

    Raises:
        ValueError: an invalid argument, or a module that cannot be sharded. The first forward
            raises the problems of the whole model.
    """
    note_sharding()
    check_manager(elastic)
    modules = list(module) if isinstance(module, (list, tuple)) else [module]
    groups = groups_by_position(mesh, dp_mesh_dims)
    reshards, kept_over = resharding(reshard_after_forward, groups[0])
    options = FullyShardOptions(
        groups=groups,
        mesh=data_parallel_mesh(mesh, dp_mesh_dims),
        reshards=reshards,
        kept_over=kept_over,
        is_auto=reshard_after_forward is None,
        policy=mp_policy,
        offload=isinstance(offload_policy, CPUOffloadPolicy),
        pins=getattr(offload_policy, "pin_memory", False),
        ignored=frozenset(ignored_params or ()),
        device_type=device_type_of(mesh),
        whole=whole_mesh(mesh, dp_mesh_dims),
        fp32_sums=reduce_scatter_with_fp32_accumulation,
        manager=elastic,
    )
    # All are checked before one is changed.
    placed = OwnPlaces({}, {}, {})
    for one in modules:
        show_tied(managed_params(one))
        check_call(one, shard_placement_fn, options, placed)
    for one in modules:
        show_tied(managed_params(one))  # to those of modules in front of it
        # Sharded first: a call that raises may be repeated.
        params = shard_now(one, options, placed)
        one.__class__ = _sharded_class(type(one))  # type: ignore[arg-type]
        # Where torch's composable functions look: `replicate` leaves sharded modules alone.
        one.__dict__.setdefault(REGISTRY_KEY, {})[SUBJECT] = RegistryItem()
        mark_as_root(one, Mark(options, Model(weakref.ref(one)), params=params))
    return module
