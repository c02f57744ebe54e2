"""The functions and classes of the package `megatron_fsdp` (0.6.1), on the engine of
`fully_shard_model`.

    mesh = init_device_mesh("cuda", (world, 1), mesh_dim_names=("dp", "tp"))
    model, optimizer = fully_shard(
        model, optimizer, mesh, dp_shard_dim="dp", tp_dim="tp", fsdp_unit_modules=[Block]
    )

The folder `as_megatron_fsdp` has a package of that name, which exports them. `HINTS` lists the
arguments that have no effect. Arguments that cannot be followed raise ValueError.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..build.grad_check import GradCheck
from ..build.materialize import target_device
from ..core.config import (
    OUTER_STRATEGIES,
    STRATEGIES,
    EngineConfig,
    MixedPrecisionPolicy,
    strategy_named,
)
from ..core.engine.step import Last
from ..core.problems import raise_problems
from ..core.runtime.rank_warnings import warn
from ..core.topology import DENSE
from ..optim.state import is_known
from ..optim.step import initialize_state
from ..plan.unit_classes import UNIT_CLASSES_OPTION as UNITS
from ..plan.unit_classes import classes_of, unit_problems
from . import optimizer as plain_optimizer
from .building import engine_for, raise_model_problems, trained_dtype
from .fully_shard import FullyShardedModel
from .named_dims import OF_EXPERTS, NamedDimsIndex, OptionalGroup

SUBJECT = "megatron_fsdp"
Units = Sequence[type[nn.Module] | str] | None

HINTS = (
    "hybrid_fsdp_expt_group", "expt_fsdp_group_ag", "preproc_state_dict_for_dcp_ckpt",
    "average_in_collective", "disable_bucketing", "nccl_ub", "fsdp_double_buffer",
    "fsdp_db_use_persist_buf_on_alloc_fail", "disable_symmetric_registration",
    "enable_fine_grained_param_gather", "use_decoupled_grad", "maxpool_double_buffer",
)  # fmt: skip
"""Arguments of `fully_shard_model` that change nothing: state dicts are ready for torch DCP anyway,
gradients are under both names, and gathers and reductions are the engine's."""


ShardingStrategy = IntEnum("ShardingStrategy", [*map(str.upper, STRATEGIES)], start=0)  # type: ignore[misc]
"""The strategies by their numbers in `megatron_fsdp`."""


def _units(module: nn.Module, named: Units) -> list[type[nn.Module] | str]:
    """The entries of `named` that match a module below `module`; warns of the others, which have no
    effect. ValueError if `named` is no list, or no class is found for an entry."""
    if isinstance(named, str | type):
        raise_problems(SUBJECT, unit_problems(module, named))
    classes = [(one, classes_of(module, [one])) for one in named or ()]
    unknown = [one for one, kinds in classes if not kinds]
    raise_problems(SUBJECT, unit_problems(module, unknown))
    _, *below = module.modules()  # `module` itself is the root, and no unit
    found = [one for one, kinds in classes if any(isinstance(child, kinds) for child in below)]
    unmatched = [one for one, _ in classes if one not in found]
    if unmatched:
        warn(
            f"{UNITS}={unmatched}: no module below {type(module).__name__} is of these classes, so "
            "they have no effect"
        )
    return found


def _ddp_config(**given: Any) -> SimpleNamespace:
    """A `ddp_config` for `MegatronFSDP`: the `given` fields, and defaults for the others.

    The constructor reads all of them but `outer_dp_sharding_strategy`, which users see in
    `ddp_config`. Whether the outer axis is sharded is in the `dist_index`.
    """
    defaults = {
        "data_parallel_sharding_strategy": "optim_grads_params",
        "outer_dp_sharding_strategy": "no_shard",
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
        "keep_fp8_transpose_cache": False,
        "megatron_fsdp_cuda_graph_mode": False,
    }
    return SimpleNamespace(**defaults | given)


def _check_followed(module: nn.Module, config: Any) -> None:
    """Raises ValueError for a `ddp_config` that asks for one graph of a step, and for a module with
    experts."""
    graph = getattr(config, "megatron_fsdp_cuda_graph_mode", None)
    if graph:
        raise ValueError(
            f"cuda_graph_mode={graph}: a step of this model cannot be captured in one graph. "
            "Leave it False"
        )
    if any(getattr(param, "allreduce", True) is False for param in module.parameters()):
        raise ValueError(f"module={type(module).__name__}: it has experts; " + OF_EXPERTS)


class MegatronFSDP(FullyShardedModel):
    """A sharded module. Its arguments are those of `fully_shard_model`, with two exceptions:

    - `dist_index` holds the groups, and whether the outer axis is sharded.
    - `ddp_config` holds the strategy, the overlaps and `keep_fp8_transpose_cache`. The argument
      `keep_fp8_transpose_cache` is read only without a `ddp_config`.

    `disable_bucketing`, and the arguments after `report_nan_in_param_grad`, have no effect.

    Megatron's loop calls some methods around a pass. Those do nothing if the engine does their work
    by itself.
    """

    def __init__(
        self,
        module: nn.Module,
        dist_index: NamedDimsIndex,
        ddp_config: Any = None,
        mixed_precision_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008, frozen
        fsdp_unit_modules: Units = None,
        disable_bucketing: bool = False,
        device: torch.device | None = None,
        calculate_per_token_loss: bool = False,
        init_model_with_meta_device: bool = False,
        sync_model_each_microbatch: bool = False,
        keep_fp8_transpose_cache: bool = False,
        report_nan_in_param_grad: bool = False,
        nccl_ub: bool = False,
        fsdp_double_buffer: bool = False,
        fsdp_db_use_persist_buf_on_alloc_fail: bool = False,
        disable_symmetric_registration: bool = False,
        enable_fine_grained_param_gather_hook: bool = False,
        enable_fine_grained_param_gather_backward_hook: bool = False,
        fine_grained_recurse_module_types: Any = None,
    ) -> None:
        # A given `ddp_config` has its own `keep_fp8_transpose_cache`.
        given = ddp_config or _ddp_config(keep_fp8_transpose_cache=keep_fp8_transpose_cache)
        _check_followed(module, given)
        policy = mixed_precision_policy
        named = _units(module, fsdp_unit_modules)
        raise_model_problems(module, named, policy.main_params_dtype, init_model_with_meta_device)
        if device is not None and not init_model_with_meta_device:
            module.to(device)
        domain = dist_index.domain(DENSE)
        ranks = domain.axis.size * domain.outer_size
        scale = 1.0 if calculate_per_token_loss else 1.0 / ranks
        strategy = given.data_parallel_sharding_strategy
        grads_dtype = policy.main_grads_dtype or trained_dtype(module)
        config = EngineConfig(
            strategy=strategy_named(strategy),
            policy=replace(policy, main_grads_dtype=grads_dtype),
            overlap_grad_reduce=given.overlap_grad_reduce,
            overlap_param_gather=given.overlap_param_gather,
            shard_outer=dist_index.hsdp_outer_dp_shard,
            keep_derived=given.keep_fp8_transpose_cache,
        )
        domains = {DENSE: replace(domain, grad_scale=scale)}
        check = GradCheck(True) if report_nan_in_param_grad else None
        engine = engine_for(module, named, domains, config, check)
        engine.zero_absent_grads(engine.groups, True)
        super().__init__(module, engine)
        # What was given, under the names that `megatron_fsdp` has.
        self.dist_index = dist_index
        self.ddp_config = given
        self.mp_policy = policy
        self.data_parallel_sharding_strategy = strategy
        # Always 0 here.
        self.microbatch_count = 0
        self.set_model_auto_sync(sync_model_each_microbatch)
        for param in self.parameters():
            param._megatron_fsdp_model = self  # type: ignore[attr-defined]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module on gathered weights; without torch.compile, which warns."""
        if torch.compiler.is_compiling():
            return self._not_compiled(*args, **kwargs)
        return self.module(*args, **kwargs)

    @torch.compiler.disable
    def _not_compiled(self, *args: Any, **kwargs: Any) -> Any:
        warn(
            "torch.compile of a MegatronFSDP: ignored, because a compiled graph does not track "
            "storage that gathers allocate and free. Compile layers of the model"
        )
        return self.module(*args, **kwargs)

    @property
    def model_auto_sync(self) -> bool:
        """True if each backward ends a step."""
        return self.engine.auto_sync

    def set_model_auto_sync(self, sync_model: bool = True) -> None:
        """Sets whether each of the next backwards ends a step. If not, the optimizer's step or
        `finish_grad_sync` ends it. Until then gradients are summed, and `.grad` is None."""
        self.engine.set_auto_sync(sync_model)
        self.engine.microbatch(last=sync_model)

    @property
    def is_last_microbatch(self) -> bool:
        """True if the next backward may be the last before a step; False if another one follows."""
        return self.engine.is_last is not Last.NO

    @is_last_microbatch.setter
    def is_last_microbatch(self, value: bool) -> None:
        self.engine.microbatch(last=value)

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Completes this step's reductions and attaches `.grad`; with any `force_all_reduce`."""
        self.engine.finish_grads()

    attach_grad_to_optimizer_state = finish_grad_sync
    zero_grad_buffer = FullyShardedModel.zero_grad

    def install_optimized_model_weights(self) -> None:
        """Has the next forward read the weights as they are now."""
        self.engine.main_weights_changed()

    def scale_gradients(self, scaling_factor: float) -> None:
        """Multiplies all gradients by `scaling_factor`, after `finish_grad_sync`."""
        self.engine.finish_grads()
        self.engine.scale_grads(scaling_factor)

    def get_distributed_index(self) -> NamedDimsIndex:
        """The `dist_index` that was given: the groups behind the mesh's dims."""
        return self.dist_index

    @contextmanager
    def mixed_precision_context(self, mixed_precision_policy: Any) -> Iterator[None]:
        """Does nothing: the model keeps the dtypes that it was sharded with."""
        yield

    def _replace_param_with_distributed_if_needed(self) -> None:
        self.engine.show_between_passes()

    def _replace_param_with_raw_if_needed(self) -> None:
        self.engine.to_unsharded()

    def _does_nothing(self, *args: Any, **kwargs: Any) -> None:
        """No-op: the engine does this work by itself when it is due."""

    start_param_sync = _does_nothing
    start_grad_sync = _does_nothing
    synchronize_param_gather = _does_nothing
    synchronize_gradient_reduce = _does_nothing
    broadcast_params = _does_nothing
    reset_mixed_precision_policy = _does_nothing


def _strategy(option: str, value: str | int, names: Collection[str]) -> str:
    """The name, one of `names`, of a strategy that is given by name or by number."""
    if value in names:
        return str(value)
    if isinstance(value, int) and 0 <= value < len(names):
        return list(names)[value]
    raise ValueError(f"{option}={value!r}: unknown. Use one of {[*enumerate(names)]}")


def fully_shard_model(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    dp_shard_dim: str | None = None,
    dp_outer_dim: str | None = None,
    tp_dim: str | None = None,
    hybrid_fsdp_group: OptionalGroup = None,
    hybrid_fsdp_expt_group: OptionalGroup = None,
    expt_device_mesh: DeviceMesh | None = None,
    fsdp_group_ag: OptionalGroup = None,
    expt_fsdp_group_ag: OptionalGroup = None,
    fsdp_unit_modules: Units = None,
    zero_dp_strategy: str | int = 3,
    outer_dp_sharding_strategy: str | int = 0,
    device: torch.device | None = None,
    init_model_with_meta_device: bool = False,
    mixed_precision_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008, frozen
    overlap_grad_reduce: bool = True,
    overlap_param_gather: bool = True,
    sync_model_each_microbatch: bool = True,
    preproc_state_dict_for_dcp_ckpt: bool = True,
    report_nan_in_param_grad: bool = False,
    average_in_collective: bool = False,
    disable_bucketing: bool = False,
    calculate_per_token_loss: bool = False,
    keep_fp8_transpose_cache: bool = False,
    nccl_ub: bool = False,
    fsdp_double_buffer: bool = False,
    fsdp_db_use_persist_buf_on_alloc_fail: bool = False,
    disable_symmetric_registration: bool = False,
    enable_fine_grained_param_gather: bool = False,
    use_decoupled_grad: bool = False,
    cuda_graph_mode: bool = False,
    maxpool_double_buffer: bool = False,
) -> MegatronFSDP:
    """Shards `module` over the ranks of `dp_shard_dim`. `HINTS` are arguments without effect.

    Args:
        device_mesh: a mesh with named dims. Without one all ranks have shards; `dp_outer_dim`,
            `tp_dim` and `hybrid_fsdp_group` are ignored then.
        dp_shard_dim: the dim whose ranks have the shards. It may be a flattened one.
        dp_outer_dim: the dim of replicas. With `outer_dp_sharding_strategy` 1 its ranks split each
            shard again.
        tp_dim: a dim that must exist. It is not used: each of its ranks has whole tensors, or has
            them cut already.
        fsdp_unit_modules: classes or import paths of modules that are gathered one by one. Those
            that match no module below `module` are left out, with a warning.
        calculate_per_token_loss: gradients are the sum over ranks, not the mean.

    ValueError: a wrong argument, one that cannot be followed (`expt_device_mesh`,
    `cuda_graph_mode`), or a module that cannot be sharded.
    """
    strategy = _strategy("zero_dp_strategy", zero_dp_strategy, STRATEGIES)
    outer = _strategy("outer_dp_sharding_strategy", outer_dp_sharding_strategy, OUTER_STRATEGIES)
    if device_mesh is None:
        dp_outer_dim, tp_dim, hybrid_fsdp_group = None, None, None
        dp_shard_dim, kind = dp_shard_dim or "fsdp", target_device(module, device).type
        world = (dist.get_world_size(),)
        device_mesh = init_device_mesh(kind, world, mesh_dim_names=(dp_shard_dim,))
    index = NamedDimsIndex(
        device_mesh,
        dp_shard_dim,
        dp_outer_dim,
        tp_dim,
        hybrid_fsdp_group,
        hsdp_outer_dp_shard=OUTER_STRATEGIES[outer],
        expt_device_mesh=expt_device_mesh,
        fsdp_group_ag=fsdp_group_ag,
    )
    config = _ddp_config(
        data_parallel_sharding_strategy=strategy,
        outer_dp_sharding_strategy=outer,
        overlap_grad_reduce=overlap_grad_reduce,
        overlap_param_gather=overlap_param_gather,
        keep_fp8_transpose_cache=keep_fp8_transpose_cache,
        megatron_fsdp_cuda_graph_mode=cuda_graph_mode,
    )
    return MegatronFSDP(
        module,
        index,
        config,
        mixed_precision_policy,
        fsdp_unit_modules,
        device=device,
        calculate_per_token_loss=calculate_per_token_loss,
        init_model_with_meta_device=init_model_with_meta_device,
        sync_model_each_microbatch=sync_model_each_microbatch,
        report_nan_in_param_grad=report_nan_in_param_grad,
    )


def fully_shard_optimizer(
    optimizer: torch.optim.Optimizer, preproc_state_dict_for_dcp_ckpt: bool = True
) -> torch.optim.Optimizer:
    """Makes `optimizer`, over the parameters of a `MegatronFSDP`, step on this rank's shards;
    returns it.

    Its state is made at once, so that torch DCP can load into `state_dict()`. That changes no
    weight and no step count. An optimizer whose state is unknown gets a warning instead.
    ValueError as from `fully_shard_optimizer` of this package.
    """
    plain_optimizer.fully_shard_optimizer(optimizer)
    optimizer.__class__ = _with_keywords(type(optimizer))  # type: ignore[arg-type]
    if is_known(optimizer):
        initialize_state(optimizer)
    else:
        warn(
            f"optimizer={type(optimizer).__name__}: state_dict() is empty until its first step, "
            "before which its state is unknown. Take a step before torch DCP loads"
        )
    return optimizer


@functools.cache
def _with_keywords(base: Any) -> type:
    """A subclass of `base` whose methods take the keywords that `megatron_fsdp` gives them."""

    @functools.wraps(base.step)
    def step(
        self: Any,
        *args: Any,
        sync_grad_before_optimizer_step: bool = True,
        install_optimized_model_weights: bool = True,
        **kwargs: Any,
    ) -> Any:
        """Takes a step. The keywords have no effect: gradients are always completed before, and the
        next forward always reads the new weights."""
        return base.step(self, *args, **kwargs)

    def zero_grad(self: Any, set_to_none: bool = True, zero_grad_buffer: bool = True) -> None:
        """Forgets the gradients of this optimizer's parameters."""
        if not zero_grad_buffer:
            raise ValueError(
                "zero_grad_buffer=False: gradients exist only in the buffer, which is freed. "
                "Leave it True, or do not call zero_grad between microbatches"
            )
        base.zero_grad(self, set_to_none)

    return type(base.__name__, (base,), {"step": step, "zero_grad": zero_grad})


def fully_shard(
    module: nn.Module, optimizer: torch.optim.Optimizer, *args: Any, **options: Any
) -> tuple[MegatronFSDP, torch.optim.Optimizer]:
    """Shards `module` by `fully_shard_model`, which gets the other arguments, and then `optimizer`.

    The optimizer was made with the parameters of `module` and has taken no step. Its groups keep
    their order and options, and get the sharded parameters.

    Raises:
        ValueError: the optimizer has parameters that are not of `module`, or state already; and the
            reasons of `fully_shard_model` and `fully_shard_optimizer`.
    """
    names = {id(param): name for name, param in module.named_parameters()}
    names_by_group = []
    foreign = 0
    for group in optimizer.param_groups:
        members = [names.get(id(param)) for param in group["params"]]
        names_by_group.append(members)
        foreign += members.count(None)
    if foreign or optimizer.state:
        raise ValueError(
            f"optimizer={type(optimizer).__name__}: {foreign} of its parameters are not of the "
            f"module, and it has state of {len(optimizer.state)}. Make it with parameters of the "
            "module and shard it before its first step, or use fully_shard_model and then "
            "fully_shard_optimizer"
        )
    model = fully_shard_model(module, *args, **options)
    params = dict(model.named_parameters())
    for group, members in zip(optimizer.param_groups, names_by_group, strict=True):
        group["params"] = [params[f"module.{name}"] for name in members]
    return model, fully_shard_optimizer(optimizer)


# The signature shows the arguments of `fully_shard_model` in the place of `*args, **options`.
_own = list(inspect.signature(fully_shard).parameters.values())[:2]
_rest = list(inspect.signature(fully_shard_model).parameters.values())[1:]
fully_shard.__signature__ = inspect.Signature(_own + _rest)  # type: ignore[attr-defined]


def find_megatron_fsdp(model: Any) -> MegatronFSDP | None:
    """The `MegatronFSDP` that `model` is, or holds in its `module` at any depth; None if there
    is none."""
    while model is not None and not isinstance(model, MegatronFSDP):
        model = getattr(model, "module", None)
    return model
