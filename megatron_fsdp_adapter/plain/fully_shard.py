"""Fully sharded data parallel for plain PyTorch modules, on the engine of Megatron's wrapper.

    model = fully_shard_model(model, mesh, fsdp_unit_modules=[Block])
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
    for batch in batches:
        model(batch).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

No Megatron is imported. A module is sharded here or by `FullyShardedDataParallel`, never by both.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..build.description import describe
from ..build.grad_check import GradCheck
from ..build.grad_sync import GradSync
from ..build.materialize import target_device
from ..build.replicas import SPLIT_STATE, check_manager
from ..core.comm.all_to_all_sum import ALL_TO_ALL_SUM
from ..core.comm.communicator import REDUCE_SCATTER
from ..core.comm.managed import Manages
from ..core.config import (
    OUTER_STRATEGIES,
    EngineConfig,
    MixedPrecisionPolicy,
    strategy_named,
)
from ..core.distributed_index import FSDPDistributedIndex
from ..plan.unit_grouping import UNIT_NUMEL
from ..plan.unsharded_budget import (
    BUDGET_OPTION,
    NO_BUDGET,
    NOTHING_TO_KEEP,
    can_keep,
    is_budget,
)
from ..rollout.export_source import Described, Source, beside_engine
from ..state.not_copyable import refuse_compilation
from ..state.sharded_state_dict import ShardedStateDict
from .building import engine_for, mark_shards, raise_model_problems
from .mesh import Ranks, data_parallel_groups, rank_count
from .user_loop import UserLoopEngine


class FullyShardedModel(GradSync, ShardedStateDict):
    """A module with sharded parameters, which `fully_shard_model` returns. Call it like the module.

    Between passes, its parameters are DTensors with the rows of this rank. Names of parameters and
    keys of `state_dict` begin with "module.". Each rank has its own buffers (running statistics):
    they are not reduced.

    Examples:
        >>> model = fully_shard_model(nn.Linear(8, 4, bias=False))
        >>> with model.no_sync():  # the first of two microbatches
        ...     model(torch.randn(2, 8)).sum().backward()
        >>> model(torch.randn(2, 8)).sum().backward()
        >>> norm = model.clip_grad_norm_(1.0)  # of the gradients of both, over all ranks
        >>> norm.shape, norm.dtype
        (torch.Size([]), torch.float32)
        >>> {name: tuple(value.shape) for name, value in model.state_dict().items()}
        {'module.weight': (4, 8)}
        >>> {name: tuple(value.to_local().shape) for name, value in model.state_dict().items()}
        {'module.weight': (2, 8)}
        >>> {name: tuple(value.shape) for name, value in model.full_state_dict().items()}
        {'weight': (4, 8)}
    """

    engine: UserLoopEngine

    def __init__(self, module: nn.Module, engine: UserLoopEngine) -> None:
        super().__init__()
        self.module = module
        self.engine = engine
        mark_shards(engine, module, self)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module on gathered weights. RuntimeError under torch.compile."""
        refuse_compilation()
        return self.module(*args, **kwargs)

    def finish_grad_sync(self) -> None:
        """Waits for this step's reductions, and sets `.grad` of the parameters. A backward outside
        of `no_sync` does so at its end, unless `set_model_auto_sync(False)` was called."""
        self.engine.finish_grads()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Deletes all gradients and frees their memory. `set_to_none` has no effect."""
        self.engine.zero_grads()

    def main_weights_changed(self) -> None:
        """Makes later forwards, on all ranks, use the current values of the parameters. Only writes
        between a forward and its backward need this call. Other writes are noticed without it."""
        self.engine.main_weights_changed(loaded=True)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields names and parameters. They are the same DTensors each time, except while a forward
        or backward runs: then they are the unsharded parameters."""
        self.engine.show_between_passes()
        return super().named_parameters(*args, **kwargs)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scales all gradients so that their norm is at most `max_norm`.

        Collective: call it on all ranks, between the last backward of a step and the optimizer. The
        norm is the p-norm (`norm_type`) of the elements of all gradients, as that of
        `torch.nn.utils.clip_grad_norm_`.

        Args:
            max_norm: the largest norm, above 0.
            norm_type: p, above 0. `float("inf")` is the largest magnitude.

        Returns:
            The norm before scaling: a float32 tensor without dims, equal on all ranks.

        Raises:
            ValueError: `norm_type` is not above 0.
        """
        if not norm_type > 0:
            raise ValueError(f"norm_type={norm_type}: must be above 0, or float('inf')")
        self.engine.complete_grads()
        grads = [param.grad for param in self.parameters() if param.grad is not None]
        shards = [getattr(grad, "_local_tensor", grad) for grad in grads]
        norm = self._norm([shard for shard in shards if shard.numel() > 0], float(norm_type))
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for shard in shards:
            shard.mul_(factor.to(shard.dtype))
        return norm

    def _norm(self, shards: list[torch.Tensor], norm_type: float) -> torch.Tensor:
        """The norm of the elements of all ranks' `shards`; collective. No shard may be empty: an
        empty tensor has no largest magnitude."""
        config = self.engine.config
        is_max_norm = norm_type == float("inf")
        op = dist.ReduceOp.MAX if is_max_norm else dist.ReduceOp.SUM
        total = torch.zeros((), dtype=torch.float32, device=self.engine.runtime.device)
        if shards:
            norms = torch.stack(torch._foreach_norm([s.float() for s in shards], norm_type))
            total = norms.max() if is_max_norm else norms.pow(norm_type).sum()
        # Plain modules have one domain.
        [domain] = {id(group.domain): group.domain for group in self.engine.groups}.values()
        if is_max_norm:
            # A maximum over ranks drops NaN, so a flag for NaN goes beside the value.
            total = torch.stack([total.nan_to_num(0.0, math.inf), total.isnan()])
        if config.strategy.shard_main:
            dist.all_reduce(total, op, domain.reduce_group)
        if config.shard_outer and domain.outer is not None:
            dist.all_reduce(total, op, domain.outer.group)
        if not is_max_norm:
            return total.pow(1.0 / norm_type)
        value, is_nan = total
        return torch.where(is_nan > 0, math.nan, value)

    def export_source(self) -> Source:
        """The model as `export_weights` sees it."""
        rest = []
        for name, value, is_buffer in beside_engine(self.module, self.engine):
            rest.append((Described(name, is_buffer=is_buffer), value))
        return Source(self.engine, lambda pair: Described(pair.managed.fqns[0]), rest)

    def describe(self) -> str:
        """Returns a table of all parameters: shapes, dtypes, units, and places in the buffers."""
        return describe(self.engine)


def _index_over(
    mesh: Ranks, module: nn.Module, mean: bool, outer_name: str, is_elastic: bool
) -> FSDPDistributedIndex:
    """The index over the ranks of `mesh`. mean: gradients are divided by the number of ranks.

    ValueError: an unknown `outer_name` (`outer_dp_sharding_strategy`), or one that needs an outer
    axis, which `mesh` does not have, or that replicas of an elastic run cannot have.
    """
    groups = data_parallel_groups(mesh)
    shard, outer = groups
    if outer_name not in OUTER_STRATEGIES:
        raise ValueError(
            f"outer_dp_sharding_strategy={outer_name!r}: unknown. Use one of "
            f"{list(OUTER_STRATEGIES)}"
        )
    shard_outer = OUTER_STRATEGIES[outer_name]
    if shard_outer and is_elastic:
        raise ValueError(
            f"elastic with outer_dp_sharding_strategy={outer_name!r}: {SPLIT_STATE}. Use 'no_shard'"
        )
    if shard_outer and outer is None:
        raise ValueError(
            f"outer_dp_sharding_strategy={outer_name!r}: there is no outer axis to shard over. "
            "Pass a mesh of two dims (outer axis, shard axis), or 'no_shard'"
        )
    scale = 1.0 / rank_count(groups) if mean else 1.0
    return FSDPDistributedIndex(
        shard,
        device_type=target_device(module, None).type,
        grad_scale=scale,
        outer_fsdp_group=outer,
        hsdp_outer_dp_shard=shard_outer,
    )


def _raise_option_problems(config: EngineConfig, budget: Any, numel: int) -> None:
    """ValueError for values of arguments that `EngineConfig` does not refuse: a budget that is
    none, or that nothing can be spent on; layers that are to be joined up to a negative number of
    elements."""
    if not is_budget(budget):
        raise ValueError(f"{BUDGET_OPTION}={budget!r}: {NO_BUDGET}")
    if budget and not can_keep(config.strategy):
        raise ValueError(f"{BUDGET_OPTION}={budget!r}: {NOTHING_TO_KEEP}")
    if numel < 0:
        raise ValueError(
            f"{UNIT_NUMEL}={numel}: the number of elements up to which layers "
            "are joined must be at least 0. Use 0 (each layer is a unit) or more"
        )


def fully_shard_model(
    module: nn.Module,
    mesh: DeviceMesh | dist.ProcessGroup | None = None,
    fsdp_unit_modules: Sequence[type[nn.Module] | str] | None = None,
    *,
    data_parallel_sharding_strategy: str = "optim_grads_params",
    outer_dp_sharding_strategy: str = "no_shard",
    mixed_precision_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008, frozen
    overlap_grad_reduce: bool = True,
    overlap_param_gather: bool = True,
    average_gradients: bool = True,
    reduce_scatter_with_fp32_accumulation: bool = False,
    check_for_nan_in_grad: bool = False,
    report_nan_in_param_grad: bool = False,
    chunked_optimizer_state_offload: bool = False,
    fsdp_unsharded_budget_gib: float | str = 0.0,
    suggested_communication_unit_size: int = 0,
    sync_model_each_microbatch: bool = True,
    init_model_with_meta_device: bool = False,
    elastic: Manages | None = None,
) -> FullyShardedModel:
    """Shards the parameters of `module` over ranks, with main weights, and returns a wrapper of it.

    The ZeRO stage is an option, as in Megatron: `data_parallel_sharding_strategy`. The names of the
    options are Megatron's. Weights of the first rank are sent to all others.

    Examples:
        >>> layers = nn.Linear(8, 8, bias=False), nn.Linear(8, 4, bias=False)
        >>> module = nn.Sequential(*layers).bfloat16()
        >>> model = fully_shard_model(module, fsdp_unit_modules=[nn.Linear])
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        >>> optimizer = fully_shard_optimizer(optimizer)
        >>> loss = model(torch.randn(2, 8, dtype=torch.bfloat16)).float().square().mean()
        >>> loss.backward()
        >>> optimizer.step()
        >>> optimizer.zero_grad()
        >>> weight = model.module[1].weight  # on each of two ranks: a float32 main weight
        >>> weight.dtype, weight.shape, weight.to_local().shape
        (torch.float32, torch.Size([4, 8]), torch.Size([2, 8]))

    Args:
        module: a module on its device, in the dtypes in which it computes. Weights of Transformer
            Engine's layers may be quantized (`fp8_model_init`). With `init_model_with_meta_device`
            it may be on the meta device: modules are then initialized by their `reset_parameters`
            (or `_reset_parameters`), in module order, one unit at a time.
        mesh: a 1-D device mesh or a process group of the ranks to shard over, by default all. Or a
            2-D mesh (outer axis, shard axis): shards are replicated along the outer axis, or split
            again with `outer_dp_sharding_strategy="optim"`. A dim "tp" of size 1 is ignored.
        fsdp_unit_modules: classes, or their names or import paths. Each instance is a unit, which
            is gathered and reduced at once; all ranks must call units in the same order. `[]` makes
            the whole module one unit. By default they are the classes in the module's
            `_no_split_modules`, or else the entries of its largest lists of layers.
        data_parallel_sharding_strategy: "no_shard", "optim", "optim_grads" or
            "optim_grads_params" (ZeRO-0 to ZeRO-3).
        mixed_precision_policy: dtypes of main weights, main gradients and sent gradients. With its
            `compute_dtype`, units compute in that dtype, and their inputs are cast to it.
        average_gradients: True averages gradients over ranks. False sums them.
        reduce_scatter_with_fp32_accumulation: True sums gradients in float32 that are sent in
            bfloat16.
        check_for_nan_in_grad: True raises an error if a gradient has a NaN or an infinity.
        report_nan_in_param_grad: True also names the parameter.
        chunked_optimizer_state_offload: True keeps main weights, and the state of a sharded
            optimizer (Adam), in host memory. A step copies them to the device, unit by unit.
        fsdp_unsharded_budget_gib: GiB for weights and gradients that stay unsharded over the
            microbatches of a step. "auto" takes the memory that is free in the first steps. It has
            an effect if all backwards of a step but the last run under `no_sync()`.
        suggested_communication_unit_size: number of elements up to which neighboring layers are
            joined to one unit. 0 joins none. A unit costs the host the same time at any size.
        sync_model_each_microbatch: True finishes gradients in each backward outside of `no_sync`
            (`set_model_auto_sync`).
        elastic: torchft's Manager. The job is then one of several replicas that may die and come
            back. Gradients are averaged over the replicas of a step, also with
            `average_gradients=False`. Step with `elastic_optimizer`.

    Raises:
        ValueError: no trainable parameters, a module that is sharded already or is on several
            devices, a unit class without an instance, or an invalid value.
    """
    main = mixed_precision_policy.main_params_dtype
    raise_model_problems(module, fsdp_unit_modules, main, init_model_with_meta_device)
    config = EngineConfig(
        strategy=strategy_named(data_parallel_sharding_strategy),
        policy=mixed_precision_policy,
        overlap_grad_reduce=overlap_grad_reduce,
        overlap_param_gather=overlap_param_gather,
        # `_index_over` refuses an unknown name.
        shard_outer=OUTER_STRATEGIES.get(outer_dp_sharding_strategy, False),
        reduce_scatter=ALL_TO_ALL_SUM if reduce_scatter_with_fp32_accumulation else REDUCE_SCATTER,
        offload=chunked_optimizer_state_offload,
        prefetch_bytes=torch.bfloat16.itemsize * suggested_communication_unit_size,
    )
    _raise_option_problems(config, fsdp_unsharded_budget_gib, suggested_communication_unit_size)
    check_manager(elastic)
    is_elastic = elastic is not None
    index = _index_over(mesh, module, average_gradients, outer_dp_sharding_strategy, is_elastic)
    domains = {name: replace(one, manager=elastic) for name, one in index.domains.items()}
    checks = check_for_nan_in_grad or report_nan_in_param_grad
    check = GradCheck(report_nan_in_param_grad) if checks else None
    engine = engine_for(
        module,
        fsdp_unit_modules,
        domains,
        config,
        check,
        fsdp_unsharded_budget_gib,
        suggested_communication_unit_size,
    )
    engine.set_auto_sync(sync_model_each_microbatch)
    return FullyShardedModel(module, engine)
