"""Reads the engine's config from the DDP config.

Names and meanings of options are Megatron-LM main's; `table.py` has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ...build.auto_budget import AutoBudget
from ...build.budget_proposal import BudgetProposal
from ...build.grad_check import GradCheck
from ...core.config import EngineConfig, MixedPrecisionPolicy, forced_overlaps, strategy_named
from ...core.engine.step import StepBudget
from ...core.runtime.rank_warnings import warn
from ...plan.unit_grouping import UNIT_NUMEL, default_unit_numel
from ...plan.unsharded_budget import AUTO, GIB, can_keep
from .cuda_graphs import captures_iteration, captures_layers
from .rules import is_on
from .table import (
    BUDGET,
    GRAD_COMM,
    MAIN_GRADS,
    MAIN_PARAMS,
    OFFLOAD,
    PARTS_OF_LAYERS,
    TRANSPOSES,
    engine_fields,
    read,
    strategies_of,
)


def unsharded_budget(config: Any, ddp_config: Any) -> int | None:
    """Extra bytes that units of one model chunk may take by staying unsharded over a step. None:
    the budget is found while training. config: the model's."""
    gib = read(ddp_config, BUDGET) or 0.0
    if gib == AUTO:
        return None
    return int(gib * GIB) // _chunk_count(config)


def step_budget(config: Any, ddp_config: Any) -> StepBudget | None:
    """An object that finds the budget while training, if that is asked for. Model chunks on one
    device share its memory. If there is no budget, one that proposes it, on the first rank."""
    budget = unsharded_budget(config, ddp_config)
    if budget is None:
        return AutoBudget(sharers=_chunk_count(config))
    if budget == 0 and dist.get_rank() == 0 and _could_find_budget(config, ddp_config):
        return BudgetProposal()
    return None


def _could_find_budget(config: Any, ddp_config: Any) -> bool:
    """True if the option could be `AUTO`, and one engine has all of the model's units."""
    if captures_iteration(config) or captures_layers(config) or _chunk_count(config) > 1:
        return False
    fields = engine_fields(ddp_config)
    if fields.get("weight_slots") or fields.get("bucket_slots"):
        return False
    return any(map(can_keep, strategies_of(ddp_config)))


def _chunk_count(config: Any) -> int:
    """The number of model chunks on each device: several with interleaved pipeline stages."""
    return config.virtual_pipeline_model_parallel_size or 1


def unit_numel(config: Any, ddp_config: Any, layer_numels: Sequence[int]) -> int:
    """Elements up to which layers are grouped; 0: not grouped.

    By default layers are not grouped if each must be a unit, or if training is not launch-bound.

    Args:
        config: the model's.
        layer_numels: elements of each layer.
    """
    asked = read(ddp_config, UNIT_NUMEL)
    if asked is not None:
        return int(asked)
    if is_on(config, PARTS_OF_LAYERS):
        return 0  # each layer must be a unit
    if captures_iteration(config) or captures_layers(config) or is_on(ddp_config, OFFLOAD):
        return 0  # training is not launch-bound
    return default_unit_numel(layer_numels)


def grad_check(ddp_config: Any) -> GradCheck | None:
    """The check of gradients before they are communicated; None if no option asks for it."""
    by_param = is_on(ddp_config, "report_nan_in_param_grad")
    if by_param or is_on(ddp_config, "check_for_nan_in_grad"):
        return GradCheck(by_param)
    return None


def precision_policy(ddp_config: Any) -> MixedPrecisionPolicy:
    """The dtypes of a valid config. `grad_reduce_in_fp32` is mapped to the names of Megatron-LM
    main, with a warning, which Python shows once for each text."""
    main_grads = read(ddp_config, MAIN_GRADS)
    comm = read(ddp_config, GRAD_COMM)
    if ddp_config.grad_reduce_in_fp32:
        main_grads = torch.float32
        comm = torch.float32
        warn(
            f"grad_reduce_in_fp32=True is read as {MAIN_GRADS}={comm} and {GRAD_COMM}={comm}",
            FutureWarning,
        )
    return MixedPrecisionPolicy(read(ddp_config, MAIN_PARAMS), main_grads, comm)


def engine_config(ddp_config: Any) -> EngineConfig:
    """The engine config of a valid `DistributedDataParallelConfig`. If a strategy needs an overlap,
    that is on with any value of its field (`forced_overlaps`)."""
    strategy = strategy_named(ddp_config.data_parallel_sharding_strategy)
    strategies = strategies_of(ddp_config)
    forced = forced_overlaps(*strategies)
    shards_weights = any(row.shard_weights for row in strategies)
    divides_sum = ddp_config.gradient_reduce_div_fusion or ddp_config.average_in_collective
    return EngineConfig(
        strategy=strategy,
        policy=precision_policy(ddp_config),
        overlap_grad_reduce=forced.get("overlap_grad_reduce", ddp_config.overlap_grad_reduce),
        overlap_param_gather=forced.get("overlap_param_gather", ddp_config.overlap_param_gather),
        # With sharded weights the transposes of backward would be a copy of the model on every
        # rank.
        keep_derived=is_on(ddp_config, TRANSPOSES) and not shards_weights,
        scale_before_sum=not divides_sum,
        **engine_fields(ddp_config),
    )
