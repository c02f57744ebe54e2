"""Rules for Megatron's model and optimizer configs, which `docs/support.md` lists. Rules for the
DDP config are in `table.py`, those of CUDA graphs in `cuda_graphs.py`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ...optim.muon.newton_schulz import COEFFICIENTS
from .cuda_graphs import captures_iteration, captures_layers
from .rules import Rule, Rules, above_one, is_on, off, unset, within
from .staging_options import slots_wanted
from .table import (
    DELAY,
    NO_FP4_WEIGHTS,
    OFFLOAD,
    PARTS_OF_LAYERS,
    UNIT_NUMEL,
    strategies_of,
)

FP8_RECIPES = ("delayed", "tensorwise", "blockwise", "mxfp8")
FP4_RECIPES = ("nvfp4",)


def _other_recipe(option: str, recipes: tuple[str, ...]) -> Rule:
    """A rule: the recipe must be one of `recipes`, of which the first is core's default."""
    name = f"{option}_recipe"

    def broken(config: Any) -> bool:
        recipe = getattr(config, name, None) or recipes[0]
        return is_on(config, option) and recipe not in recipes

    return Rule(
        name,
        broken,
        f"{option.upper()} is supported with the recipes {list(recipes)}. Use one of them",
    )


_LOGITS = (
    "after a step core reads the largest logits from layers of an unwrapped model, and scales "
    "rows of unsharded weights. Set it to False"
)


def _captures_in_another_way(config: Any) -> bool:
    if getattr(config, "cuda_graph_impl", None) in (None, "none"):
        return False
    return not captures_iteration(config) and not captures_layers(config)


def _offloads_what_core_cannot(config: Any) -> bool:
    if not is_on(config, "cpu_offloading"):
        return False
    recomputes = getattr(config, "recompute_granularity", None) is not None
    return recomputes or above_one(config, "pipeline_model_parallel_size")


MODEL_CONFIG_RULES: Rules = (
    _other_recipe("fp8", FP8_RECIPES),
    _other_recipe("fp4", FP4_RECIPES),
    off("fp4_param", NO_FP4_WEIGHTS),
    Rule(
        "cuda_graph_impl",
        _captures_in_another_way,
        "layers captured by Transformer Engine do not run the hooks that gather weights. Set it "
        "to 'local' (graphs of layers), to 'full_iteration' (before megatron-core 0.18: 'local' "
        "with cuda_graph_scope='full_iteration'), or to 'none'",
    ),
    off("enable_cuda_graph", "the older name of cuda_graph_impl='local'. Set that instead"),
    off(
        "external_cuda_graph",
        "captured layers do not run the hooks that gather weights. Set it to False",
    ),
    Rule(
        "cpu_offloading",
        _offloads_what_core_cannot,
        "core requires pipeline_model_parallel_size=1 and no recompute_granularity with it. Set it "
        "to False, or change these",
    ),
    off(
        "defer_embedding_wgrad_compute",
        "the output layer's weight gradient would come after its bucket has been reduced. Set it "
        "to False",
    ),
    off(
        "hybrid_context_parallel",
        "its ranks run different numbers of forward passes, but all ranks gather weights in each; "
        "Megatron-LM rejects it with use_megatron_fsdp too. Set it to False",
    ),
    off(
        "moe_use_legacy_grouped_gemm",
        "all experts of a rank are one tensor, which a checkpoint cannot distinguish from that of "
        "another rank. Set it to False: moe_grouped_gemm then uses Transformer Engine's layers",
    ),
    off(
        "use_kitchen",
        "it is not known how its layers write weight gradients. Set it to False; Transformer "
        "Engine's FP8 recipes are supported",
    ),
    off("qk_clip", _LOGITS),
    off("log_max_attention_logit", _LOGITS),
    unset(
        "quant_recipe",
        "recipes for single layers are not supported, only fp8_recipe for the whole model. Leave "
        "it unset",
    ),
    off(
        "enable_autocast",
        "autocast keeps casts of weights after the weights are resharded. Set it to False, and "
        "params_dtype (bf16, fp16) to the compute dtype",
    ),
)


def _interleaves_split_halves(option: str) -> Rule:
    """A rule: `option` must not be set with tensor parallelism."""

    def broken(config: Any) -> bool:
        is_split = above_one(config, "tensor_model_parallel_size")
        experts_are_split = above_one(config, "expert_tensor_parallel_size")
        return is_on(config, option) and (is_split or experts_are_split)

    return Rule(
        option,
        broken,
        "gate and linear rows are interleaved on each tensor-parallel rank, which a checkpoint "
        "cannot represent. Leave it unset, or use no tensor parallelism",
    )


_REMAT = "ranks of one data-parallel group would hold different parts of a weight"
_OWN_RECIPE = (
    "its kernel supports only MXFP8 and NVFP4 on Blackwell GPUs, and was not tested with this "
    "wrapper. Set it to False: the layers then compute the same with fp8_recipe"
)
_ONE_TENSOR = (
    "all experts of a rank are one tensor, which a checkpoint cannot distinguish from that of "
    "another rank; Megatron-LM rejects it with use_megatron_fsdp too. Set it to False"
)


def _above_tensor_parallel(option: str, size: str) -> Rule:
    """A rule: the number `option` must not exceed the number `size`, to which core sets it by
    default. Up to that only tensor parallelism splits weights."""

    def broken(config: Any) -> bool:
        tensor_ranks: Any = getattr(config, "tensor_model_parallel_size", 1)
        ranks: Any = getattr(config, size, None) or tensor_ranks
        shards: Any = getattr(config, option, None) or 1
        return bool(shards > ranks)

    return Rule(option, broken, f"{_REMAT}. Leave it unset")


def _must_be_one(option: str) -> Rule:
    """A rule: `option`, the number of ranks that split a weight further, must be 1."""
    return Rule(option, lambda config: above_one(config, option), f"{_REMAT}. Set it to 1")


def _splits_routers(config: Any) -> bool:
    return is_on(config, "flextron") and above_one(config, "pipeline_model_parallel_size")


LATER_MODEL_RULES: Rules = (
    off(
        "overlap_dispatch_backward_with_experts_wgrad",
        "weight gradients of experts come after the experts' backward, on another stream, which "
        "is not tested with this wrapper. Set it to False, and use "
        "overlap_moe_expert_parallel_comm=True with delay_wgrad_compute=True, which overlaps the "
        "same exchange with the same GEMMs",
    ),
    _must_be_one("gtp_weight_remat_size"),
    _must_be_one("expert_gtp_weight_remat_size"),
    _above_tensor_parallel("tensor_parallel_num_weight_shards", "tensor_model_parallel_size"),
    _above_tensor_parallel(
        "expert_tensor_parallel_num_weight_shards", "expert_tensor_parallel_size"
    ),
    _interleaves_split_halves("moe_mlp_glu_interleave_size"),
    _interleaves_split_halves("moe_shared_expert_glu_interleave_size"),
    off("moe_single_grouped_weight", _ONE_TENSOR),
    off("moe_single_grouped_bias", _ONE_TENSOR),
    off("use_grouped_gemm_for_dense_mlp", _OWN_RECIPE),
    off("use_grouped_gemm_for_shared_expert", _OWN_RECIPE),
    Rule(
        "flextron",
        _splits_routers,
        "core sums gradients of routers over pipeline stages, but these are sharded. Use no "
        "pipeline parallelism, or set it to False",
    ),
)
"""Rules of options that 0.16.1 does not have."""


def _keeps_two_slots(config: Any) -> bool:
    shards_weights = any(row.shard_weights for row in strategies_of(config))
    return bool(shards_weights and slots_wanted(config)["weight_slots"])


def _with_parts_of_layers(broken: Callable[[Any], Any], message: str, beside: str) -> Rule:
    """A rule: `PARTS_OF_LAYERS` must not be on where `broken` is true. beside: describes that
    case."""

    def both(config: Any) -> bool:
        return is_on(config, PARTS_OF_LAYERS) and broken(config)

    return Rule(PARTS_OF_LAYERS, both, message, beside)


SCHEDULE_RULES: Rules = (
    Rule(
        DELAY,
        lambda config: is_on(config, DELAY) and not is_on(config, PARTS_OF_LAYERS),
        f"without {PARTS_OF_LAYERS} the delayed gradients are never computed. Set both, or neither",
    ),
    _with_parts_of_layers(
        _keeps_two_slots,
        "two concurrent passes each prefetch a layer, but fixed buffers hold two layers. Set "
        "fsdp_double_buffer, nccl_ub and fsdp_copy_engine_all_gather to False, or use "
        "'optim_grads'",
        "gathered weights in fixed buffers",
    ),
    _with_parts_of_layers(
        lambda config: is_on(config, UNIT_NUMEL),
        f"a unit of several layers would stay unsharded for the whole pass. Leave {UNIT_NUMEL} "
        "unset, or set it to 0",
        f"{UNIT_NUMEL}={{0.{UNIT_NUMEL}}}",
    ),
    _with_parts_of_layers(
        captures_iteration,
        "a capture of the streams of core's schedule was not tested. Turn one of the two off",
        "full-iteration CUDA graphs",
    ),
)
"""Rules of core's schedule of parts of layers, for the joined model and DDP config."""

MODEL_CONFIG_RULES += LATER_MODEL_RULES


def _moment_dtype(option: str) -> Rule:
    """A rule: `option` must be a dtype without scales."""

    def broken(config: Any) -> bool:
        return getattr(config, option, torch.float32) not in (torch.float32, torch.bfloat16)

    return Rule(
        option,
        broken,
        "a checkpoint would lack the scales of fp16 and fp8 moments. Use torch.float32 or "
        "torch.bfloat16",
    )


CORES_OFFLOAD = "optimizer_cpu_offload"
"""Megatron's option with the meaning of `chunked_optimizer_state_offload` here."""


def streams_all(config: Any) -> bool:
    """True if core's offload of the optimizer is on in a supported form."""
    if not is_on(config, CORES_OFFLOAD) or config.optimizer != "adam":
        return False
    return _offloaded_fraction(config) == 1.0


def _offloaded_fraction(config: Any) -> float:
    return getattr(config, "optimizer_offload_fraction", 1.0)


LION = "lion"
MUON = "muon"
EMERGING = (LION, MUON)
"""The supported ones of core's emerging optimizers; their updates are computed here. Those that are
not supported need whole matrices, some with state of another shape (SOAP)."""
OPTIMIZERS = ("adam", "sgd", *EMERGING)

HALF = "medium"
"""The value of `muon_fp32_matmul_prec` for 16-bit GEMMs."""
SCALES: Mapping[str, Callable[[int, int], float]] = {
    "spectral": lambda rows, columns: math.sqrt(max(rows, columns)),
    "unit_rms_norm": lambda rows, columns: math.sqrt(rows / columns),
    "shape_scaling": lambda rows, columns: math.sqrt(max(1, rows / columns)),
}
"""`muon_scale_mode` -> factor on an update, as in NVIDIA's emerging_optimizers."""
MUON_CHOICES: Mapping[str, tuple[str, ...]] = {
    "muon_coefficient_type": tuple(COEFFICIENTS),
    "muon_scale_mode": tuple(SCALES),
    "muon_fp32_matmul_prec": (HALF, "high", "highest"),
    "muon_scalar_optimizer": ("adam",),
}


def _one_of(name: str, known: tuple[str, ...]) -> Rule:
    """A rule: the option `name` of Muon must be missing or have one of the `known` values."""
    return Rule(
        name,
        lambda config: getattr(config, name, known[0]) not in known,
        f"sharded weights support {list(known)}. Use one of them",
    )


MUON_RULES: Rules = within(
    lambda config: config.optimizer == MUON,
    "optimizer={0.optimizer!r}",
    *(_one_of(name, known) for name, known in MUON_CHOICES.items()),
    Rule(
        "muon_num_ns_steps",
        lambda config: getattr(config, "muon_num_ns_steps", 5) < 1,
        "it must be at least 1. Use 1 or more",
    ),
    Rule(
        "muon_momentum",
        lambda config: not 0 <= getattr(config, "muon_momentum", 0) < 1,
        "use 0 or more, and less than 1",
    ),
)


def _only_adam(option: str, message: str, beside: str = "") -> Rule:
    """A rule: with `option` the optimizer must be Adam."""

    def broken(config: Any) -> bool:
        return config.optimizer != "adam" and is_on(config, option)

    return Rule("optimizer", broken, message, beside)


OPTIMIZER_CONFIG_RULES: Rules = (
    Rule(
        "optimizer",
        lambda config: config.optimizer not in OPTIMIZERS,
        f"sharded weights support {list(OPTIMIZERS)}. Use one of them",
    ),
    Rule(
        "optimizer",
        lambda config: config.optimizer in EMERGING and is_on(config, "fp16"),
        "megatron-core does not support it with fp16=True. Use bf16, or 'adam'",
    ),
    _only_adam(
        OFFLOAD,
        f"only the state of 'adam' can be streamed. Use 'adam', or set {OFFLOAD} to False",
        f"{OFFLOAD}=True",
    ),
    _only_adam(
        CORES_OFFLOAD,
        f"{CORES_OFFLOAD}=True supports only 'adam'. Use 'adam', or set that option to False",
    ),
    _only_adam(
        "use_precision_aware_optimizer",
        "use_precision_aware_optimizer=True supports only 'adam'. Use 'adam', or set that option "
        "to False",
    ),
    _moment_dtype("exp_avg_dtype"),
    _moment_dtype("exp_avg_sq_dtype"),
    Rule(
        "optimizer_offload_fraction",
        lambda config: is_on(config, CORES_OFFLOAD) and _offloaded_fraction(config) != 1.0,
        "partial offload is not supported, because updates are streamed unit by unit. Use 1.0, "
        f"or set {CORES_OFFLOAD} to False",
    ),
    off(
        "overlap_param_gather_with_optimizer_step",
        "it splits model chunks between two optimizers, but one optimizer has all parameters "
        "here. Set it to False",
    ),
    off(
        "optimizer_cuda_graph",
        "a graph of the optimizer's step is not supported. Set it to False",
    ),
    off(
        "use_layer_wise_distributed_optimizer",
        "it needs whole matrices on single ranks, but weights are sharded. Set it to False",
    ),
    *MUON_RULES,
)
"""Rules for the joined optimizer and DDP config."""
