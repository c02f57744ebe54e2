"""What is read from Megatron's DDP config, and what of it is refused.

This file alone reads a `DistributedDataParallelConfig`. Names and meanings of options are
Megatron-LM main's; a field that megatron-core 0.16.1 lacks is read with main's default.
`docs/support.md` lists what is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .config import (
    OUTER_STRATEGIES,
    STRATEGIES,
    EngineConfig,
    MixedPrecisionPolicy,
    forced_overlaps,
    strategy_named,
)
from .support import Rule


def _is_set(option: str) -> Callable[[Any], bool]:
    return lambda config: bool(getattr(config, option, False))


def _dtype_is_not(option: str, *allowed: torch.dtype | None) -> Callable[[Any], bool]:
    return lambda config: getattr(config, option, allowed[0]) not in allowed


def _keeps_grads(config: Any) -> bool:
    row = STRATEGIES.get(config.data_parallel_sharding_strategy)
    return row is not None and not row.shard_grads


def _comm_dtype_of(config: Any) -> torch.dtype | None:
    return getattr(config, "megatron_fsdp_grad_comm_dtype", None)


DDP_CONFIG_RULES: tuple[Rule, ...] = (
    Rule(
        "use_megatron_fsdp",
        lambda config: not config.use_megatron_fsdp,
        "Megatron's optimizer, gradient finalisation and checkpoints take their FSDP path only if "
        "it is set; set it to True",
    ),
    Rule(
        "data_parallel_sharding_strategy",
        lambda config: config.data_parallel_sharding_strategy not in STRATEGIES,
        f"use one of {list(STRATEGIES)}",
    ),
    Rule(
        "use_distributed_optimizer",
        lambda config: not config.use_distributed_optimizer,
        "the optimizer must be Megatron's DistributedOptimizer; set it to True",
    ),
    Rule(
        "num_distributed_optimizer_instances",
        lambda config: config.num_distributed_optimizer_instances < 1,
        "it is a number of replicas of the shards; set it to 1 or more",
    ),
    Rule(
        "outer_dp_sharding_strategy",
        lambda config: config.outer_dp_sharding_strategy not in OUTER_STRATEGIES,
        f"use one of {list(OUTER_STRATEGIES)}",
    ),
    Rule(
        "outer_dp_sharding_strategy",
        lambda config: (
            OUTER_STRATEGIES.get(config.outer_dp_sharding_strategy, False)
            and config.num_distributed_optimizer_instances == 1
        ),
        "there is no outer axis to shard over with num_distributed_optimizer_instances=1; set that "
        "to 2 or more, or this to 'no_shard'",
    ),
    Rule(
        "preserve_fp32_weights",
        lambda config: not getattr(config, "preserve_fp32_weights", True),
        "main weights other than float32 are not supported yet; set it to True",
    ),
    Rule(
        "megatron_fsdp_main_params_dtype",
        _dtype_is_not("megatron_fsdp_main_params_dtype", torch.float32),
        "main weights other than float32 are not supported yet; set it to torch.float32",
    ),
    Rule(
        "megatron_fsdp_main_grads_dtype",
        _dtype_is_not("megatron_fsdp_main_grads_dtype", None, torch.float32),
        "main gradients other than float32 need the precision-aware optimizer, which is not "
        "supported yet; leave it unset",
    ),
    Rule(
        "megatron_fsdp_grad_comm_dtype",
        _dtype_is_not("megatron_fsdp_grad_comm_dtype", None, torch.float32, torch.bfloat16),
        "gradients are communicated in float32 or bfloat16; leave it unset or use one of them",
    ),
    Rule(
        "megatron_fsdp_grad_comm_dtype",
        lambda config: _keeps_grads(config) and _comm_dtype_of(config) not in (None, torch.float32),
        "'no_shard' and 'optim' reduce the float32 gradient buffer in place; leave it unset, or "
        "use 'optim_grads' or 'optim_grads_params'",
    ),
    Rule("fp8_param_gather", _is_set("fp8_param_gather"), "FP8 parameters are not supported"),
    Rule("fp4_param_gather", _is_set("fp4_param_gather"), "FP4 parameters are not supported"),
    Rule(
        "reuse_grad_buf_for_mxfp8_param_ag",
        _is_set("reuse_grad_buf_for_mxfp8_param_ag"),
        "MXFP8 parameters are not supported; set it to False",
    ),
    Rule("keep_fp8_transpose_cache", _is_set("keep_fp8_transpose_cache"), "needs FP8 parameters"),
    Rule(
        "nccl_ub", _is_set("nccl_ub"), "NCCL user buffers are not supported yet; set it to False"
    ),
    Rule(
        "fsdp_double_buffer",
        _is_set("fsdp_double_buffer"),
        "fixed communication buffers are not supported yet; set it to False",
    ),
    Rule(
        "fsdp_manual_registration",
        _is_set("fsdp_manual_registration"),
        "it needs nccl_ub, which is not supported yet; set it to False",
    ),
    Rule(
        "megatron_fsdp_version",
        lambda config: getattr(config, "megatron_fsdp_version", 1) != 1,
        "this wrapper has the interface of version 1; use 1",
    ),
    Rule(
        "megatron_fsdp_enable_fine_grained_param_gather",
        _is_set("megatron_fsdp_enable_fine_grained_param_gather"),
        "weights are gathered by units; set it to False, and name smaller modules with "
        "fsdp_unit_modules where units are too large",
    ),
    Rule(
        "megatron_fsdp_max_pool_double_buffer",
        _is_set("megatron_fsdp_max_pool_double_buffer"),
        "fixed communication buffers are not supported yet; set it to False",
    ),
    Rule(
        "fsdp_db_use_persist_buf_on_alloc_fail",
        _is_set("fsdp_db_use_persist_buf_on_alloc_fail"),
        "it needs fsdp_double_buffer, which is not supported yet; set it to False",
    ),
    Rule(
        "delay_wgrad_compute",
        _is_set("delay_wgrad_compute"),
        "delayed weight gradients are not supported yet; set it to False",
    ),
    Rule(
        "check_for_large_grads",
        _is_set("check_for_large_grads"),
        "per-bucket checks are not supported yet; set it to False",
    ),
    Rule(
        "reduce_scatter_with_fp32_accumulation",
        _is_set("reduce_scatter_with_fp32_accumulation"),
        "it is not supported yet; set it to False (gradients travel in float32 by default)",
    ),
)


def shards_outer(ddp_config: Any) -> bool:
    """Whether `ddp_config` splits main weights again over the outer axis; False for a name that is
    unknown, which the rules report."""
    return OUTER_STRATEGIES.get(ddp_config.outer_dp_sharding_strategy, False)


def engine_config(ddp_config: Any) -> EngineConfig:
    """Reads a `DistributedDataParallelConfig` that has no problems. Overlap that the strategy
    needs is taken as on, whatever the field says (`forced_overlaps`)."""
    strategy = strategy_named(ddp_config.data_parallel_sharding_strategy)
    forced = forced_overlaps(strategy)
    return EngineConfig(
        strategy=strategy,
        policy=MixedPrecisionPolicy(grad_comm_dtype=_comm_dtype_of(ddp_config)),
        overlap_grad_reduce=forced.get("overlap_grad_reduce", ddp_config.overlap_grad_reduce),
        overlap_param_gather=forced.get("overlap_param_gather", ddp_config.overlap_param_gather),
        prefetch_bytes=4 * int(getattr(ddp_config, "suggested_communication_unit_size", None) or 0),
        shard_outer=shards_outer(ddp_config),
        check_for_nan_in_grad=ddp_config.check_for_nan_in_grad,
        report_nan_in_param_grad=bool(getattr(ddp_config, "report_nan_in_param_grad", False)),
    )
