"""What is read from Megatron's DDP config, and what of it is refused.

This file alone reads a `DistributedDataParallelConfig`. Names and meanings of options are
Megatron-LM main's; a field that megatron-core 0.16.1 lacks is read with main's default.
`docs/support.md` lists what is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from ...core.config import (
    OUTER_STRATEGIES,
    STRATEGIES,
    EngineConfig,
    MixedPrecisionPolicy,
    forced_overlaps,
    strategy_named,
)
from ...core.runtime.rank_warnings import warn
from ...sharding.unsharded_budget import GIB, can_keep
from ...sharding.unsharded_budget import OPTION as BUDGET
from . import unit_grouping
from .staging_options import slots_wanted
from .support import NO_FP4_WEIGHTS, Rule, is_on, off


def _dtype_is_not(option: str, *allowed: torch.dtype | None) -> Callable[[Any], bool]:
    return lambda config: getattr(config, option, allowed[0]) not in allowed


def _is_said(config: Any, option: str) -> bool:
    """Whether somebody set `option`, as far as can be seen: it is not the class's default, or the
    class has no such field."""
    if not hasattr(config, option):
        return False
    field = getattr(type(config), "__dataclass_fields__", {}).get(option)
    return field is None or getattr(config, option) != field.default


MAIN_PARAMS, MAIN_GRADS, GRAD_COMM = (
    "megatron_fsdp_main_params_dtype",
    "megatron_fsdp_main_grads_dtype",
    "megatron_fsdp_grad_comm_dtype",
)


def _contradicts_main_params(config: Any) -> bool:
    """`preserve_fp32_weights` is True and other main weights are asked for, or the reverse."""
    preserve = getattr(config, "preserve_fp32_weights", None)
    chosen = getattr(config, MAIN_PARAMS, torch.float32)
    if preserve is None or not _is_said(config, "preserve_fp32_weights"):
        return False
    if preserve:
        return chosen != torch.float32
    return chosen == torch.float32 and _is_said(config, MAIN_PARAMS)


def _contradicts_grad_dtypes(config: Any) -> bool:
    chosen = [getattr(config, option, None) for option in (MAIN_GRADS, GRAD_COMM)]
    return config.grad_reduce_in_fp32 and any(d not in (None, torch.float32) for d in chosen)


def _accumulates_otherwise(config: Any) -> bool:
    """Some gradients are to accumulate in float32, and none does."""
    chosen = getattr(config, MAIN_GRADS, None)
    return is_on(config, "param_name_patterns_for_fp32_local_accumulation") and chosen not in (
        None,
        torch.float32,
    )


def _sums_in_vain(config: Any) -> bool:
    """`reduce_scatter_with_fp32_accumulation` where no sum would be rounded, or it is anyway."""
    row = STRATEGIES.get(config.data_parallel_sharding_strategy)
    comm = getattr(config, GRAD_COMM, None)
    grads = getattr(config, MAIN_GRADS, None) or torch.float32
    useful = comm == torch.bfloat16 and grads == torch.float32 and row is not None
    return config.reduce_scatter_with_fp32_accumulation and not (useful and row.shard_main)  # type: ignore[union-attr]


def _is_budget(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value) and value >= 0


def _keeps_all(config: Any) -> bool:
    row = STRATEGIES.get(config.data_parallel_sharding_strategy)
    return row is not None and not can_keep(row)


DDP_CONFIG_RULES: tuple[Rule, ...] = (
    *unit_grouping.RULES,
    off("fp4_param_gather", NO_FP4_WEIGHTS),
    Rule(
        "use_megatron_fsdp",
        lambda config: not config.use_megatron_fsdp,
        "Megatron's optimizer, gradient finalization and checkpoints take their FSDP path only if "
        "it is set; set it to True",
    ),
    Rule(
        "data_parallel_sharding_strategy",
        lambda config: config.data_parallel_sharding_strategy not in STRATEGIES,
        f"use one of {list(STRATEGIES)}",
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
        _contradicts_main_params,
        f"{MAIN_PARAMS} says otherwise; leave this unset, it is the older name",
    ),
    Rule(
        "grad_reduce_in_fp32",
        _contradicts_grad_dtypes,
        f"it asks for float32 main gradients and communication, but {MAIN_GRADS} or {GRAD_COMM} "
        "is another dtype; set it to False (--grad-reduce-in-bf16 in Megatron-LM's script), or "
        "leave those unset",
    ),
    Rule(
        BUDGET,
        lambda config: not _is_budget(getattr(config, BUDGET, None) or 0.0),
        "it is a number of GiB for weights and gradients that stay unsharded over a step; use 0 or "
        "more",
    ),
    Rule(
        BUDGET,
        lambda config: bool(getattr(config, BUDGET, None)) and _keeps_all(config),
        "this strategy shards neither gradients nor weights, so that there is nothing to keep; use "
        "'optim_grads_params' or 'optim_grads', or set it to 0",
    ),
    Rule(
        MAIN_PARAMS,
        _dtype_is_not(MAIN_PARAMS, torch.float32, torch.bfloat16, None),
        "main weights are float32, bfloat16, or (None) in each parameter's own dtype",
    ),
    Rule(
        MAIN_GRADS,
        _dtype_is_not(MAIN_GRADS, None, torch.float32, torch.bfloat16),
        "gradients accumulate in float32 or bfloat16; leave it unset or use one of them",
    ),
    Rule(
        GRAD_COMM,
        _dtype_is_not(GRAD_COMM, None, torch.float32, torch.bfloat16),
        "gradients are communicated in float32 or bfloat16; leave it unset or use one of them",
    ),
    Rule(
        "reduce_scatter_with_fp32_accumulation",
        _sums_in_vain,
        "it is for bfloat16 on the wire and float32 main gradients, with a strategy that "
        f"reduce-scatters; set {GRAD_COMM}=torch.bfloat16 and 'optim', 'optim_grads' or "
        "'optim_grads_params', or set it to False",
    ),
    off(
        "fsdp_grad_comm_fp8_blocks",
        "gradients in 8-bit blocks were worth 1.6% inside one NVLink domain, and never ran on a "
        f"slower network; set it to False, and {GRAD_COMM}=torch.bfloat16 (--grad-reduce-in-bf16) "
        "halves what gradients put on the wire",
    ),
    Rule(
        "param_name_patterns_for_fp32_local_accumulation",
        _accumulates_otherwise,
        f"{MAIN_GRADS} says that all gradients accumulate in another dtype; leave that unset, and "
        "all of them accumulate in float32, or leave this empty",
    ),
)


OFFLOAD = unit_grouping.STREAMED
"""The name of ours in the DDP config. The wrapper has to know it: it makes main weights."""


def forced_options(ddp_config: Any, config: Any) -> dict[str, bool]:
    """What must be set in a config that has no problems and is not, with its values: the overlaps
    that the strategy needs; the distributed optimizer, by which core picks process groups; what
    follows from quantized weights. As in Megatron-LM main, whoever asks for this wrapper need not
    ask for that as well. `config` is the model's."""
    strategy = strategy_named(ddp_config.data_parallel_sharding_strategy)
    needed = {"use_distributed_optimizer": True, **forced_overlaps(strategy)}
    if is_on(config, FP8_PARAM):
        needed[FP8_PARAM_GATHER] = True
    needed[MXFP8_BUFFER] = False
    if not keeps_transposes(ddp_config):
        needed[TRANSPOSES] = False
    return {
        name: value for name, value in needed.items() if getattr(ddp_config, name, False) != value
    }


FP8_PARAM, FP8_PARAM_GATHER = "fp8_param", "fp8_param_gather"
"""The option of a model config by which weights are made quantized, and that of the DDP config
which says that they are gathered so. Core from 0.19 on reads the second under its own DDP: without
it quantized weights are never written again. Here weights are what the model has."""

MXFP8_BUFFER = "reuse_grad_buf_for_mxfp8_param_ag"
"""Core's DDP lays out gathered MXFP8 weights in the memory of gradients, before it makes them. Here
bytes are gathered, so that there is nothing to lay out; core's optimizer would never tell this
wrapper about a step."""

TRANSPOSES = "keep_fp8_transpose_cache"


def keeps_transposes(ddp_config: Any) -> bool:
    """Whether what backward derives from quantized weights stays until weights change: asked for,
    and weights are kept. Of sharded weights it would be a copy of the whole model on every rank."""
    strategy = strategy_named(ddp_config.data_parallel_sharding_strategy)
    return is_on(ddp_config, TRANSPOSES) and not strategy.shard_weights


def shards_outer(ddp_config: Any) -> bool:
    """Whether `ddp_config` splits main weights again over the outer axis; False for a name that is
    unknown, which the rules report."""
    return OUTER_STRATEGIES.get(ddp_config.outer_dp_sharding_strategy, False)


def gathers_separately(ddp_config: Any) -> bool:
    """Whether gathers are to have process groups of their own. Ours: Megatron-LM has a flag of that
    name, and none of its configs a field."""
    return bool(getattr(ddp_config, "create_all_gather_group", False))


def gathers_parts(ddp_config: Any) -> bool:
    """Whether parts of a layer's experts are units of their own."""
    return is_on(ddp_config, "megatron_fsdp_enable_fine_grained_param_gather")


def main_params_dtype(ddp_config: Any) -> torch.dtype | None:
    """Of the main weights; None for each parameter's own."""
    chosen = getattr(ddp_config, MAIN_PARAMS, torch.float32)
    own = getattr(ddp_config, "preserve_fp32_weights", None) is False
    return None if own and chosen == torch.float32 else chosen


def unsharded_budget(ddp_config: Any) -> int:
    """Bytes that units may take more than their strategy does, to stay whole over a step."""
    return int((getattr(ddp_config, BUDGET, None) or 0.0) * GIB)


def precision_policy(ddp_config: Any) -> MixedPrecisionPolicy:
    """The dtypes of a config that has no problems. The two older names are mapped onto those of
    Megatron-LM main, with a warning."""
    main_params = main_params_dtype(ddp_config)
    main_grads = getattr(ddp_config, MAIN_GRADS, None)
    comm = getattr(ddp_config, GRAD_COMM, None)
    if getattr(ddp_config, "preserve_fp32_weights", None) is False:
        _warn_of_older_name("preserve_fp32_weights=False", f"{MAIN_PARAMS}={main_params}")
    if ddp_config.grad_reduce_in_fp32:
        main_grads = comm = torch.float32
        _warn_of_older_name(
            "grad_reduce_in_fp32=True", f"{MAIN_GRADS}={main_grads} and {GRAD_COMM}={comm}"
        )
    return MixedPrecisionPolicy(main_params, main_grads, comm)


def _warn_of_older_name(given: str, meaning: str) -> None:
    """Python shows one warning of each text from one place, so this is said once."""
    warn(f"{given} is read as {meaning}", FutureWarning)


def engine_config(ddp_config: Any) -> EngineConfig:
    """Reads a `DistributedDataParallelConfig` that has no problems. Overlap that the strategy
    needs is taken as on, whatever the field says (`forced_overlaps`)."""
    strategy = strategy_named(ddp_config.data_parallel_sharding_strategy)
    forced = forced_overlaps(strategy)
    return EngineConfig(
        strategy=strategy,
        policy=precision_policy(ddp_config),
        overlap_grad_reduce=forced.get("overlap_grad_reduce", ddp_config.overlap_grad_reduce),
        overlap_param_gather=forced.get("overlap_param_gather", ddp_config.overlap_param_gather),
        prefetch_bytes=unit_grouping.prefetch_bytes(ddp_config),
        shard_outer=shards_outer(ddp_config),
        **slots_wanted(ddp_config),
        fp32_accumulation=ddp_config.reduce_scatter_with_fp32_accumulation,
        offload=is_on(ddp_config, OFFLOAD),
        whole=(),  # `with_single_rank_domains` knows domains
        keep_derived=keeps_transposes(ddp_config),
        scale_before_sum=not (
            ddp_config.gradient_reduce_div_fusion or ddp_config.average_in_collective
        ),
    )
