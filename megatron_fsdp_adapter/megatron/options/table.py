"""The options of the DDP config that this wrapper reads, one row for each.

A row defines the field of the config class (`ddp_config.py`), the flag for a Megatron-LM that lacks
it, the fields of `EngineConfig` that it sets, its rules, its value in `prove`'s other strategies,
and the row in `docs/options.md` (`tests/lib/megatron/option_pages.py`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from ...core.comm.all_to_all_sum import ALL_TO_ALL_SUM, FIXED_ALL_TO_ALL_SUM
from ...core.config import OUTER_STRATEGIES, STRATEGIES, Strategy
from ...core.topology import DENSE, EXPERT
from ...optim.residency import OFFLOAD_OPTION as OFFLOAD
from ...plan.unit_grouping import UNIT_NUMEL
from ...plan.unsharded_budget import AUTO, NO_BUDGET, NOTHING_TO_KEEP, can_keep, is_budget
from ...plan.unsharded_budget import BUDGET_OPTION as BUDGET
from .option import Count, Dtype, Fields, Gib, Option, Refusal, Test, Text
from .rules import Rule, Rules, is_on, off

STRATEGY = "data_parallel_sharding_strategy"
EXPERT_STRATEGY = "expert_data_parallel_sharding_strategy"
INSTANCES = "num_distributed_optimizer_instances"
OUTER = "outer_dp_sharding_strategy"
EXPERT_INSTANCES = "expert_num_distributed_optimizer_instances"
EXPERT_OUTER = "expert_outer_dp_sharding_strategy"
MAIN_PARAMS = "megatron_fsdp_main_params_dtype"
MAIN_GRADS = "megatron_fsdp_main_grads_dtype"
GRAD_COMM = "megatron_fsdp_grad_comm_dtype"
GATHER_PARTS = "megatron_fsdp_enable_fine_grained_param_gather"
GATHER_GROUPS = "create_all_gather_group"
CE_ALL_GATHER = "fsdp_copy_engine_all_gather"
CE_REDUCE_SCATTER = "fsdp_copy_engine_reduce_scatter"
"""An all-to-all on the copy engines, after which this package sums."""
FP32_SUMS = "param_name_patterns_for_fp32_local_accumulation"
DECOUPLED = "megatron_fsdp_use_decoupled_grad"
VERSION = "megatron_fsdp_version"
TRANSPOSES = "keep_fp8_transpose_cache"
ELASTIC = "fsdp_elastic"
REPLICAS = "fsdp_elastic_replicas"
PARTS_OF_LAYERS = "overlap_moe_expert_parallel_comm"
DELAY = "delay_wgrad_compute"
"""The first is in the model config, the second in model and DDP config."""

ITERATION = "full-iteration CUDA graphs"
LAYERS = "CUDA graphs of layers"


def strategies_by_kind(config: Any) -> dict[str, Strategy]:
    """The rows of dense and of expert parameters; unknown names are left out."""
    dense = read(config, STRATEGY)
    names = {DENSE: dense, EXPERT: read(config, EXPERT_STRATEGY) or dense}
    return {kind: STRATEGIES[name] for kind, name in names.items() if name in STRATEGIES}


def strategies_of(config: Any) -> list[Strategy]:
    """The rows of dense and of expert parameters, each once; unknown names are left out."""
    return list(dict.fromkeys(strategies_by_kind(config).values()))


def expert_instances_of(config: Any) -> int:
    """The number of replicas of experts: by default that of dense parameters."""
    own = read(config, EXPERT_INSTANCES)
    return int(read(config, INSTANCES) if own is None else own)


def _is_low(config: Any, *options: str) -> bool:
    """True if one of the dtypes is set and is not float32."""
    return any(read(config, option) not in (None, torch.float32) for option in options)


def _sums_in_vain(sums: Any, config: Any) -> bool:
    """True if `reduce_scatter_with_fp32_accumulation` is on but has no effect on rounding."""
    is_bf16 = read(config, GRAD_COMM) == torch.bfloat16
    has_reduce_scatter = any(row.shard_main for row in strategies_of(config))
    useful = is_bf16 and has_reduce_scatter and not _is_low(config, MAIN_GRADS)
    return bool(sums and not useful)


def _is_no_budget(value: Any, config: Any) -> bool:
    return not is_budget(value or 0.0)


def _finds_budget_of_slots(value: Any, config: Any) -> bool:
    if value != AUTO:
        return False
    fields = engine_fields(config)
    return bool(fields.get("weight_slots") or fields.get("bucket_slots"))


def _keeps_what_is_whole(value: Any, config: Any) -> bool:
    """True if there is a budget, but no strategy shards what it could be spent on."""
    rows = strategies_of(config)
    return bool(value and rows) and not any(map(can_keep, rows))


def _other(*allowed: Any) -> Test:
    """A test: the value is none of `allowed`."""
    return lambda value, config: value not in allowed


def _asked(value: Any, config: Any) -> bool:
    return bool(value)


def _unless(sharded: str) -> Test:
    """A test: the option is on, but the field `sharded` (`shard_grads`, for example) of each
    strategy is False: there is no shard that the option could apply to."""

    def broken(value: Any, config: Any) -> bool:
        rows = strategies_of(config)
        return bool(value and rows) and not any(getattr(row, sharded) for row in rows)

    return broken


def _without_nccl(value: Any, config: Any) -> bool:
    """True if the option is on and the wrapper's device is no GPU."""
    device = getattr(config, "device", None)
    return bool(value and device is not None and device.type != "cuda")


def _without_pools(value: Any, config: Any) -> bool:
    """True if the option is on and torch's allocator has a setting that excludes memory pools."""
    settings = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    return bool(value and "expandable_segments:True" in settings)


_REGISTERED: tuple[Refusal, ...] = (
    (_without_nccl, "it needs NCCL. Set it to False", "the model on {0.device}"),
    (
        _without_pools,
        "it is incompatible with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True. Remove that "
        "setting, or set the option to False",
    ),
)
_WITH_STRATEGY = f"{STRATEGY}={{0.{STRATEGY}!r}}"
_OF_REGISTRATION: Refusal = (
    lambda value, config: value and not is_on(config, "nccl_ub"),
    "it requires nccl_ub, which is off. Set nccl_ub=True",
)
_IN_SLOTS = "gathered weights and buckets in fixed buffers, each as large as the largest unit"


def _only_if_set(**fields: Any) -> Fields:
    """A function of a value: `fields` if the option is on, else none."""

    def sets(value: Any) -> Mapping[str, Any]:
        return fields if value else {}

    return sets


def _sets_expert_strategy(name: Any) -> Mapping[str, Any]:
    """The strategy of the experts' domain, if it is given."""
    if name not in STRATEGIES:
        return {}
    return {"domain_strategies": ((EXPERT, STRATEGIES[name]),)}


def _sets_expert_outer(name: Any) -> Mapping[str, Any]:
    """The outer strategy of the experts' domain, if it is given."""
    if name not in OUTER_STRATEGIES:
        return {}
    return {"domain_shard_outer": ((EXPERT, OUTER_STRATEGIES[name]),)}


_sets_slots = _only_if_set(weight_slots=True, bucket_slots=True)

NO_FP4_WEIGHTS = (
    "weights cannot be kept or gathered in NVFP4. Leave it unset (--fp4-param-gather): weights "
    "are gathered in bf16, and with fp4 Transformer Engine quantizes them in forward"
)

OPTIONS: tuple[Option, ...] = (
    Option(
        "use_megatron_fsdp", bool, False, in_core=True,
        refused=((lambda value, config: not value,
                  "Megatron's optimizer, gradient finalization and checkpoints use their FSDP "
                  "path only if it is set. Set it to True"),),
    ),
    Option(
        STRATEGY, str, "no_shard", in_core=True,
        refused=((_other(*STRATEGIES), f"use one of {list(STRATEGIES)}"),),
    ),
    Option(
        EXPERT_STRATEGY, Text, None,
        f"another strategy for experts: {', '.join(STRATEGIES)}; default: that of all parameters",
        use="experts that are already spread over many ranks, beside dense layers that are not: "
        "`optim` or `optim_grads` keeps their weights on each rank",
        some_strategies=True,
        sets=_sets_expert_strategy,
        refused=((_other(None, *STRATEGIES), f"use one of {list(STRATEGIES)}, or leave it unset"),),
    ),
    Option(
        INSTANCES, int, 1, in_core=True,
        refused=((lambda value, config: value < 1,
                  "the number of replicas must be at least 1. Set it to 1 or more"),),
    ),
    Option(
        OUTER, str, "no_shard",
        "no_shard or optim: sharding of main weights and optimizer state over optimizer instances",
        use="`optim`: several instances divide the optimizer state among them", plain=OUTER,
        in_core=True, some_strategies=True,
        sets=lambda value: {"shard_outer": OUTER_STRATEGIES.get(value, False)},
        refused=(
            (_other(*OUTER_STRATEGIES), f"use one of {list(OUTER_STRATEGIES)}"),
            (lambda value, config: OUTER_STRATEGIES.get(value) and read(config, INSTANCES) == 1,
             f"with {INSTANCES}=1 there is no second instance to shard over. Set {INSTANCES} to 2 "
             "or more, or this option to 'no_shard'"),
        ),
    ),
    Option(
        EXPERT_INSTANCES, Count, None,
        "another number of replicas of experts; default: that of dense parameters",
        use="dense parameters in replicas, and experts sharded over all ranks that have them (1), "
        "or the other way round",
        some_strategies=True,
        refused=((lambda value, config: value is not None and value < 1,
                  "the number of replicas must be at least 1. Set it to 1 or more, or leave it "
                  "unset"),),
    ),
    Option(
        EXPERT_OUTER, Text, None,
        f"another sharding of experts over their replicas: {', '.join(OUTER_STRATEGIES)}; default: "
        "that of dense parameters",
        use="`no_shard` beside `optim` of dense parameters: replicas of experts exchange nothing "
        "after a step",
        some_strategies=True,
        sets=_sets_expert_outer,
        refused=(
            (_other(None, *OUTER_STRATEGIES), f"use one of {list(OUTER_STRATEGIES)}, or leave it "
             "unset"),
            (lambda value, config: (OUTER_STRATEGIES.get(value)
                                    and expert_instances_of(config) == 1),
             f"there is one replica of experts, so no second one to shard over. Set "
             f"{EXPERT_INSTANCES} to 2 or more, or this option to 'no_shard'"),
        ),
    ),
    Option(
        UNIT_NUMEL, Count, None, in_core=True,
        sets=lambda value: {"prefetch_bytes": torch.bfloat16.itemsize * int(value or 0)},
        refused=((lambda value, config: (value or 0) < 0,
                  "the number of elements up to which layers are grouped must be at least 0. "
                  "Leave it unset, or use 0 (each layer is a unit) or more"),),
    ),
    Option(
        "preserve_fp32_weights", bool | None, None,
        use="removed in 0.17. True has no effect; False is refused",
        refused=((lambda value, config: value is False,
                  f"main weights in each parameter's dtype are {MAIN_PARAMS}=None (auto), which "
                  "replaces it. Set that, and leave this option unset"),),
    ),
    Option(
        "grad_reduce_in_fp32", bool, False, in_core=True,
        refused=((lambda value, config: value and _is_low(config, MAIN_GRADS, GRAD_COMM),
                  f"it means float32 main gradients and communication, but {MAIN_GRADS} or "
                  f"{GRAD_COMM} is another dtype. Set it to False (--grad-reduce-in-bf16 in "
                  "Megatron-LM), or leave the other two unset"),),
    ),
    Option(
        MAIN_PARAMS, Dtype, torch.float32,
        "dtype of the weights that the optimizer updates; auto: that of each parameter",
        use="bf16, or `auto`, with the precision-aware optimizer", plain="mixed_precision_policy",
        refused=((_other(torch.float32, torch.bfloat16, None),
                  "only float32, bfloat16 and None (each parameter's dtype) are supported. Use "
                  "one of them"),),
    ),
    Option(
        MAIN_GRADS, Dtype, None,
        "dtype of gradient accumulation and of the optimizer's gradients; auto: fp32",
        use="bf16 with few microbatches and the precision-aware optimizer",
        plain="mixed_precision_policy",
        refused=((_other(None, torch.float32, torch.bfloat16),
                  "gradients accumulate in float32 or bfloat16. Leave it unset or use one of "
                  "them"),),
    ),
    Option(
        GRAD_COMM, Dtype, None, "dtype of communicated gradients; auto: that of main gradients",
        use="bf16 halves the traffic of a slow network", plain="mixed_precision_policy",
        refused=((_other(None, torch.float32, torch.bfloat16),
                  "gradients are communicated in float32 or bfloat16. Leave it unset or use one "
                  "of them"),),
    ),
    Option(
        "reduce_scatter_with_fp32_accumulation", bool, False, in_core=True, some_strategies=True,
        sets=_only_if_set(reduce_scatter=ALL_TO_ALL_SUM),
        refused=((_sums_in_vain,
                  "it requires bfloat16 communication, float32 main gradients and a strategy with "
                  f"a reduce-scatter. Set {GRAD_COMM}=torch.bfloat16 and 'optim', 'optim_grads' or "
                  "'optim_grads_params', or set it to False"),),
    ),
    Option(
        FP32_SUMS, tuple[str, ...], (), use="all gradients accumulate in fp32 anyway",
        refused=((lambda value, config: value and _is_low(config, MAIN_GRADS),
                  f"{MAIN_GRADS} sets another dtype for all gradients. Leave that one unset, so "
                  "that all gradients accumulate in float32, or leave this option empty"),),
    ),
    Option(
        GATHER_PARTS, bool, False,
        "parts of a layer's experts are separate units, which are gathered separately",
        use="a layer of many experts that is too large to gather whole",
    ),
    Option("fsdp_double_buffer", bool, False, in_core=True, some_strategies=True, sets=_sets_slots),
    Option(
        "megatron_fsdp_max_pool_double_buffer", bool, False, _IN_SLOTS,
        use="as `fsdp_double_buffer`", some_strategies=True, sets=_sets_slots,
    ),
    Option(
        "fsdp_db_use_persist_buf_on_alloc_fail", bool, False,
        "no effect: every unit fits its buffer",
    ),
    Option(
        "nccl_ub", bool, False, in_core=True, some_strategies=True, sets=_sets_slots,
        refused=_REGISTERED,
    ),
    Option(
        "fsdp_manual_registration", bool, False, in_core=True, some_strategies=True,
        refused=(_OF_REGISTRATION,),
    ),
    Option(
        "disable_symmetric_registration", bool, False, in_core=True, refused=(_OF_REGISTRATION,)
    ),
    Option(
        CE_ALL_GATHER, bool, False,
        "weights are gathered by the GPUs' copy engines (docs/performance.md)",
        use="inside one NVLink domain", some_strategies=True,
        sets=_only_if_set(weight_slots=True),
        refused=(
            *_REGISTERED,
            (_unless("shard_weights"),
             "weights are not sharded between microbatches. Use 'optim_grads_params', or set it "
             "to False", _WITH_STRATEGY),
        ),
    ),
    Option(
        CE_REDUCE_SCATTER, bool, False,
        "gradients are exchanged by the GPUs' copy engines, and each rank sums its shard in rank "
        "order",
        use="inside one NVLink domain; needs one more buffer, as large as the largest unit",
        some_strategies=True,
        sets=_only_if_set(bucket_slots=True, reduce_scatter=FIXED_ALL_TO_ALL_SUM),
        refused=(
            *_REGISTERED,
            (_unless("shard_grads"),
             "gradients are not sharded. Use 'optim_grads' or 'optim_grads_params', or set it to "
             "False", _WITH_STRATEGY),
        ),
    ),
    Option(
        BUDGET, Gib, 0.0,
        "GiB per GPU for weights and gradients that stay unsharded over a step; auto: the memory "
        "that is free in the first steps (docs/memory.md)",
        use="several microbatches and memory to spare "
        "([memory.md](memory.md#when-there-is-memory-to-spare))",
        plain=BUDGET, some_strategies=True,
        refused=(
            (_is_no_budget, NO_BUDGET),
            (_finds_budget_of_slots,
             "'auto' needs units with buffers of their own, but units share fixed buffers. Use a "
             "number of GiB",
             "fixed buffers"),
            (_keeps_what_is_whole, NOTHING_TO_KEEP),
        ),
    ),
    Option(
        OFFLOAD, bool, False,
        "main weights and moments in host memory, updated on the GPU unit by unit "
        "(docs/memory.md)",
        use="a model that does not fit otherwise ([memory.md](memory.md#optimizer-in-host-memory))",
        plain=OFFLOAD, sets=lambda value: {"offload": bool(value)},
        excludes={ITERATION: (
            "a replay does not detect that new weights were loaded into host memory"
        )},
    ),
    Option(
        GATHER_GROUPS, bool, False,
        "creates separate process groups for gathers if the wrapper receives none",
        use=(
            "experts on several GPUs: gathers do not queue behind reductions "
            "([performance.md](performance.md)). Megatron-LM 0.19 parses the flag but creates no "
            "groups. `dp_cp_ag` and `expt_dp_ag` of a `ProcessGroupCollection` take precedence"
        ),
    ),
    Option(
        "check_for_nan_in_grad", bool, False, in_core=True,
        excludes={ITERATION: (
            "a captured step cannot raise an error (--no-check-for-nan-in-loss-and-grad)"
        )},
    ),
    Option(
        "check_for_large_grads", bool, False, in_core=True,
        refused=((_asked,
                  "norms of units are not compared with norms of earlier steps. Set it to False; "
                  "check_for_nan_in_grad finds gradients that are not finite"),),
    ),
    Option(
        "report_nan_in_param_grad", bool, False, plain="report_nan_in_param_grad",
        use="like `check_for_nan_in_grad`; the error also names the parameter",
    ),
    Option(
        TRANSPOSES, bool, False, in_core=True,
        excludes={LAYERS: "a replay does not recreate transposes that existed at capture"},
    ),
    Option(
        "fp4_param_gather", bool, False, use="not supported: weights are gathered in bf16",
        refused=((_asked, NO_FP4_WEIGHTS),),
    ),
    Option(
        VERSION, int, 1, "version of Megatron's wrapper; this package has only one engine",
        use="set to 1: Megatron-LM refuses the distributed optimizer beside 2",
    ),
    Option(
        ELASTIC, Text, None,
        "host:port of torchft's lighthouse: this job is one of several replicas that may die and "
        "come back (docs/elastic.md)",
        use="jobs that train together, and go on without one that dies", plain="elastic",
    ),
    Option(
        REPLICAS, Count, None,
        "the largest number of replicas that train together; datasets are made for it",
        use=f"with `{ELASTIC}`",
    ),
    Option("num_buckets", int | None, None),
    Option(DECOUPLED, bool, False),
    Option("megatron_fsdp_cuda_graph_mode", bool, False),
    Option("fsdp_all_gather_in_start_param_sync", bool, True),
)  # fmt: skip

_DEFAULTS: Mapping[str, Any] = {option.name: option.default for option in OPTIONS}

DDP_CONFIG_RULES: Rules = tuple(rule for option in OPTIONS for rule in option.rules())


def read(config: Any, option: str) -> Any:
    """The value of an option, or its row's default if the config lacks it."""
    return getattr(config, option, _DEFAULTS[option])


def engine_fields(ddp_config: Any) -> dict[str, Any]:
    """The fields of `EngineConfig` that options set; those of later rows replace earlier ones."""
    fields: dict[str, Any] = {}
    for option in OPTIONS:
        fields |= option.sets(read(ddp_config, option.name))
    return fields


def excluded(kind: str) -> list[Rule]:
    """Rules of the options that one kind of CUDA graphs excludes."""
    rules = []
    for option in OPTIONS:
        if option.excludes and kind in option.excludes:
            rules.append(off(option.name, f"{option.excludes[kind]}. Switch it off", kind))
    return rules
