"""What the engine is told: strategy, dtypes and overlap. The only reader of Megatron's DDP config.

Names and meanings of options are Megatron-LM main's; a field that megatron-core 0.16.1 lacks is
read with main's default.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Strategy:
    """What is sharded over the data-parallel axis (ZeRO, arXiv:1910.02054).

    Attributes:
        shard_weights: compute weights exist only while a unit uses them.
        shard_grads: main gradients exist as this rank's shard; every backward reduces.
        shard_main: main weights and optimizer state exist as this rank's shard.
    """

    name: str
    zero_stage: int
    shard_weights: bool
    shard_grads: bool
    shard_main: bool


STRATEGIES: Mapping[str, Strategy] = {
    row.name: row
    for row in (
        Strategy("no_shard", 0, shard_weights=False, shard_grads=False, shard_main=False),
        Strategy("optim", 1, shard_weights=False, shard_grads=False, shard_main=True),
        Strategy("optim_grads", 2, shard_weights=False, shard_grads=True, shard_main=True),
        Strategy("optim_grads_params", 3, shard_weights=True, shard_grads=True, shard_main=True),
    )
}


OUTER_STRATEGIES: Mapping[str, bool] = {"no_shard": False, "optim": True}
"""Names of `outer_dp_sharding_strategy`: whether the outer axis splits main weights and optimizer
state again, under every row of `STRATEGIES`."""


def strategy_named(name: str) -> Strategy:
    """The row called `name`; ValueError lists the rows."""
    if name not in STRATEGIES:
        raise ValueError(
            f"data_parallel_sharding_strategy={name!r} is unknown: use one of {list(STRATEGIES)}"
        )
    return STRATEGIES[name]


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Dtypes beside the compute dtype, which is the parameters' own.

    Attributes:
        main_params_dtype: dtype of the weights that the optimizer updates.
        main_grads_dtype: dtype in which gradients accumulate; None means float32.
        grad_comm_dtype: dtype on the wire; None means the main-gradient dtype.
    """

    main_params_dtype: torch.dtype = torch.float32
    main_grads_dtype: torch.dtype | None = None
    grad_comm_dtype: torch.dtype | None = None

    @property
    def grads_dtype(self) -> torch.dtype:
        return torch.float32 if self.main_grads_dtype is None else self.main_grads_dtype

    @property
    def comm_dtype(self) -> torch.dtype:
        return self.grads_dtype if self.grad_comm_dtype is None else self.grad_comm_dtype


@dataclass(frozen=True)
class EngineConfig:
    """Everything the engine is told.

    Attributes:
        strategy: a row of `STRATEGIES`.
        policy: dtypes of main weights, main gradients and gradient communication.
        overlap_grad_reduce: start a unit's reduction as soon as its backward is over.
        overlap_param_gather: gather a unit's weights while the unit before it computes.
        prefetch_bytes: weights, in bytes, that may be gathered ahead of the unit that computes;
            the next unit is gathered ahead whatever its size.
        padding_bound: largest share of padding in a flat buffer before it is cut in segments.
        max_segments: most segments of a flat buffer; 1 packs by least common multiple.
        shard_outer: main weights and optimizer state are split again over the outer axis of a
            domain that has one; otherwise its instances hold the same (HSDP).
    """

    strategy: Strategy
    policy: MixedPrecisionPolicy = MixedPrecisionPolicy()
    overlap_grad_reduce: bool = True
    overlap_param_gather: bool = True
    prefetch_bytes: int = 0
    padding_bound: float = 0.01
    max_segments: int = 4
    shard_outer: bool = False

    def __post_init__(self) -> None:
        if self.strategy.shard_grads and not self.overlap_grad_reduce:
            raise ValueError(
                f"overlap_grad_reduce=False with {self.strategy.name}: sharded gradients are "
                "reduced as each unit's backward ends; set overlap_grad_reduce=True"
            )
        if self.strategy.shard_weights and not self.overlap_param_gather:
            raise ValueError(
                f"overlap_param_gather=False with {self.strategy.name}: sharded weights are "
                "gathered unit by unit; set overlap_param_gather=True"
            )
        if not self.strategy.shard_grads and self.policy.comm_dtype != self.policy.grads_dtype:
            raise ValueError(
                f"grad_comm_dtype={self.policy.comm_dtype} with {self.strategy.name}: unsharded "
                f"gradients are reduced in place, in {self.policy.grads_dtype}; leave it unset, or "
                "shard gradients"
            )
        if self.prefetch_bytes < 0:
            raise ValueError(f"prefetch_bytes={self.prefetch_bytes}: must be 0 or more")


def forced_overlaps(strategy: Strategy) -> dict[str, bool]:
    """The DDP config fields that `strategy` needs set, and their values."""
    forced = {}
    if strategy.shard_grads:
        forced["overlap_grad_reduce"] = True
    if strategy.shard_weights:
        forced["overlap_param_gather"] = True
    return forced


@dataclass(frozen=True)
class Rule:
    """An option that is refused: `broken(ddp_config)` tells when, `message` why and the remedy."""

    option: str
    broken: Callable[[Any], bool]
    message: str


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
        "delay_wgrad_compute",
        _is_set("delay_wgrad_compute"),
        "delayed weight gradients are not supported yet; set it to False",
    ),
    Rule(
        "check_for_nan_in_grad",
        _is_set("check_for_nan_in_grad"),
        "per-bucket NaN checks are not supported yet; set it to False",
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
    )
