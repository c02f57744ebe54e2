"""What of a Megatron model or optimizer configuration is refused, and why. `docs/support.md` lists
the same. Rules for the DDP config are in `table.py`, of CUDA graphs in `cuda_graphs.py`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ...optim.muon.newton_schulz import COEFFICIENTS
from .cuda_graphs import captures_iteration, captures_layers
from .rules import Rule, above_one, is_on, off, unset, within
from .staging_options import slots_wanted
from .table import (
    DELAY,
    NO_FP4_WEIGHTS,
    OFFLOAD,
    PARTS_OF_LAYERS,
    UNIT_NUMEL,
    strategy_of,
)

FP8_RECIPES = ("delayed", "tensorwise", "blockwise", "mxfp8")
FP4_RECIPES = ("nvfp4",)


def _other_recipe(option: str, recipes: tuple[str, ...]) -> Rule:
    """Reduced precision by a recipe that is none of `recipes`, the first being core's default."""
    name = f"{option}_recipe"
    return Rule(
        name,
        lambda config: is_on(config, option)
        and (getattr(config, name, None) or recipes[0]) not in recipes,
        f"{option.upper()} is supported with the recipes {list(recipes)}; use one of them",
    )


MODEL_CONFIG_RULES: tuple[Rule, ...] = (
    _other_recipe("fp8", FP8_RECIPES),
    _other_recipe("fp4", FP4_RECIPES),
    off("fp4_param", NO_FP4_WEIGHTS),
    Rule(
        "cuda_graph_impl",
        lambda config: (
            getattr(config, "cuda_graph_impl", "none") not in (None, "none")
            and not captures_iteration(config)
            and not captures_layers(config)
        ),
        "layers that Transformer Engine captures do not run the hooks that gather weights; set it "
        "to 'local' (graphs of layers), to 'full_iteration' (before megatron-core 0.18: 'local' "
        "with cuda_graph_scope='full_iteration'), or to 'none'",
    ),
    off("enable_cuda_graph", "it is the older name of cuda_graph_impl='local'; set that instead"),
    off("external_cuda_graph", "captured layers do not run the hooks that gather weights"),
    Rule(
        "cpu_offloading",
        lambda config: is_on(config, "cpu_offloading")
        and (
            above_one(config, "pipeline_model_parallel_size")
            or getattr(config, "recompute_granularity", None) is not None
        ),
        "core offloads activations only with pipeline_model_parallel_size=1 and without "
        "recompute_granularity; choose one of them",
    ),
    off(
        "defer_embedding_wgrad_compute",
        "the output layer's weight gradient would come after the last backward, when its bucket "
        "has been reduced; set it to False",
    ),
    off(
        "hybrid_context_parallel",
        "its ranks run different numbers of forward passes, and weights are gathered by all of "
        "them in each; Megatron-LM refuses it with use_megatron_fsdp too; set it to False",
    ),
    off(
        "moe_use_legacy_grouped_gemm",
        "all experts of a rank are one tensor, which a checkpoint cannot tell from another rank's; "
        "set it to False, and moe_grouped_gemm takes Transformer Engine's layers",
    ),
    off(
        "use_kitchen",
        "nobody has seen how its layers write weight gradients; set it to False, Transformer "
        "Engine's FP8 recipes are supported",
    ),
    unset(
        "quant_recipe",
        "it quantizes the layers that it names by recipes that are supported only as fp8_recipe, "
        "for the whole model; leave it unset",
    ),
    off(
        "enable_autocast",
        "autocast keeps casts of weights beyond the time for which they are gathered; set it to "
        "False, and params_dtype (bf16, fp16) to the dtype to compute in",
    ),
)


def _interleaves_split_halves(option: str) -> Rule:
    sizes = ("tensor_model_parallel_size", "expert_tensor_parallel_size")
    return Rule(
        option,
        lambda config: (
            bool(getattr(config, option, None))
            and any(above_one(config, size) for size in sizes)
        ),
        "gate and linear rows are mixed on each tensor-parallel rank, which a checkpoint cannot "
        "tell; leave it unset, or use no tensor parallelism",
    )


_SHARDS = "more ranks hold parts of a weight, and data-parallel groups contain them"
_REMAT = "its ranks hold parts of a weight, and data-parallel groups contain them; set it to 1"
_OWN_RECIPE = (
    "it is a kernel for MXFP8 and NVFP4 alone, which Blackwell GPUs compute, and was never run "
    "with this wrapper for want of one; set it to False, and the layers compute the same by "
    "fp8_recipe"
)
_ONE_TENSOR = (
    "all experts of a rank are one tensor, which a checkpoint cannot tell from another rank's, and "
    "Megatron-LM refuses it with use_megatron_fsdp too; set it to False"
)

def _above_tensor_parallel(option: str, size: str) -> Rule:
    """Core sets it to that size by itself: then weights are split by tensor parallelism alone."""

    def broken(config: Any) -> bool:
        whole: Any = getattr(config, "tensor_model_parallel_size", 1)
        ranks: Any = getattr(config, size, None) or whole
        shards: Any = getattr(config, option, None) or 1
        return bool(shards > ranks)

    return Rule(option, broken, f"{_SHARDS}; leave it unset")


LATER_MODEL_RULES: tuple[Rule, ...] = (
    off(
        "overlap_dispatch_backward_with_experts_wgrad",
        "weight gradients of experts come after the experts' own backward, on a stream of core's, "
        "and that was never run with this wrapper; set it to False, and "
        "overlap_moe_expert_parallel_comm=True with delay_wgrad_compute=True, which hides the same "
        "exchange behind the same products, is supported",
    ),
    *(
        Rule(size, lambda config, size=size: above_one(config, size), _REMAT)  # type: ignore[misc]
        for size in ("gtp_weight_remat_size", "expert_gtp_weight_remat_size")
    ),
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
        lambda config: bool(getattr(config, "flextron", False))
        and above_one(config, "pipeline_model_parallel_size"),
        "core adds up the routers' whole gradients over pipeline stages, and they are sharded; use "
        "no pipeline parallelism, or set it to False",
    ),
)
"""Options that 0.16.1 does not have."""


def _keeps_two_slots(config: Any) -> bool:
    row = strategy_of(config)
    return row is not None and row.shard_weights and slots_wanted(config)["weight_slots"]


SCHEDULE_RULES: tuple[Rule, ...] = (
    Rule(
        DELAY,
        lambda config: is_on(config, DELAY) and not is_on(config, PARTS_OF_LAYERS),
        f"without {PARTS_OF_LAYERS} the gradients that it leaves for later are never made; set "
        "both, or neither",
    ),
    Rule(
        PARTS_OF_LAYERS,
        lambda config: is_on(config, PARTS_OF_LAYERS) and _keeps_two_slots(config),
        "two passes read layers at a time, and each gathers one ahead, which two slots do not "
        "hold; set fsdp_double_buffer, nccl_ub and a zero-copy all-gather to False, or use "
        "'optim_grads'",
        "gathered weights in fixed buffers",
    ),
    Rule(
        PARTS_OF_LAYERS,
        lambda config: is_on(config, PARTS_OF_LAYERS) and is_on(config, UNIT_NUMEL),
        "a unit of several layers would stay gathered while any of them may run, through the whole "
        f"pass; leave {UNIT_NUMEL} unset, or set it to 0",
        f"{UNIT_NUMEL}={{0.{UNIT_NUMEL}}}",
    ),
    Rule(
        PARTS_OF_LAYERS,
        lambda config: is_on(config, PARTS_OF_LAYERS) and captures_iteration(config),
        "the streams of core's schedule were never captured with this wrapper; set one of them off",
        "full-iteration CUDA graphs",
    ),
)
"""Of core's schedule of parts of layers: of a model config and a DDP config as one."""

MODEL_CONFIG_RULES += LATER_MODEL_RULES


def _moment_dtype(option: str) -> Rule:
    return Rule(
        option,
        lambda config: (
            getattr(config, option, torch.float32) not in (torch.float32, torch.bfloat16)
        ),
        "the scales of fp16 and fp8 moments would not be in a checkpoint; use torch.float32 or "
        "torch.bfloat16",
    )


CORES_OFFLOAD = "optimizer_cpu_offload"
"""Megatron's option: it asks for what `chunked_optimizer_state_offload` is here."""


def streams_all(config: Any) -> bool:
    """Whether core's offload of the optimizer is asked for in a way that is supported."""
    return (
        is_on(config, CORES_OFFLOAD)
        and config.optimizer == "adam"
        and getattr(config, "optimizer_offload_fraction", 1.0) == 1.0
    )


LION, MUON, ADAPTIVE = "lion", "muon", "adaptive_muon"
EMERGING = (LION, MUON, ADAPTIVE)
"""Optimizers that core calls so, and that are supported: their updates are computed here. Others
need whole matrices too, some with state of another shape than theirs (SOAP)."""
OPTIMIZERS = ("adam", "sgd", *EMERGING)

METHOD = "adamuon"
"""Of `adaptive_muon_moment2_method`: the one whose second moment is entry by entry. The others have
means over rows, columns or all of a matrix, which ranks have parts of."""
HALF = "medium"
"""Of `muon_fp32_matmul_prec`: products of 16 bits."""
SCALES: Mapping[str, Callable[[int, int], float]] = {
    "spectral": lambda rows, columns: math.sqrt(max(rows, columns)),
    "unit_rms_norm": lambda rows, columns: math.sqrt(rows / columns),
    "shape_scaling": lambda rows, columns: math.sqrt(max(1, rows / columns)),
}
"""The factor on an update, by `muon_scale_mode`, as NVIDIA's emerging_optimizers have them."""
MUON_CHOICES: Mapping[str, tuple[str, ...]] = {
    "adaptive_muon_moment2_method": (METHOD,),
    "muon_coefficient_type": tuple(COEFFICIENTS),
    "muon_scale_mode": tuple(SCALES),
    "muon_fp32_matmul_prec": (HALF, "high", "highest"),
    "muon_scalar_optimizer": ("adam",),
}


def _one_of(name: str, known: tuple[str, ...]) -> Rule:
    """An option of Muon with other values than these; what a config lacks has its default. Those of
    the adaptive one are read by that one alone."""
    return Rule(
        name,
        lambda config: getattr(config, name, known[0]) not in known
        and (config.optimizer == ADAPTIVE or not name.startswith(ADAPTIVE)),
        f"with sharded weights it is one of {list(known)}; use one of them",
    )


MUON_RULES: tuple[Rule, ...] = within(
    lambda config: config.optimizer in (MUON, ADAPTIVE), "optimizer={0.optimizer!r}",
    *(_one_of(name, known) for name, known in MUON_CHOICES.items()),
    Rule(
        "muon_num_ns_steps",
        lambda config: getattr(config, "muon_num_ns_steps", 5) < 1,
        "there is at least one",
    ),
    Rule(
        "muon_momentum",
        lambda config: not 0 <= getattr(config, "muon_momentum", 0) < 1,
        "use 0 or more, and less than 1",
    ),
)  # fmt: skip

OPTIMIZER_CONFIG_RULES: tuple[Rule, ...] = (
    Rule(
        "optimizer",
        lambda config: config.optimizer not in OPTIMIZERS,
        f"with sharded weights megatron-core's optimizer is one of {list(OPTIMIZERS)}; use one of "
        "them",
    ),
    Rule(
        "optimizer",
        lambda config: config.optimizer in EMERGING and is_on(config, "fp16"),
        "with fp16=True megatron-core does not have it either; use bf16, or 'adam'",
    ),
    Rule(
        "optimizer",
        lambda config: config.optimizer != "adam" and is_on(config, OFFLOAD),
        "the state of 'adam' alone is streamed; use that, or set the latter to False",
        f"{OFFLOAD}=True",
    ),
    Rule(
        "optimizer",
        lambda config: is_on(config, CORES_OFFLOAD) and config.optimizer != "adam",
        f"with {CORES_OFFLOAD}=True it is 'adam', whose state alone is streamed; use that, or set "
        "the latter to False",
    ),
    Rule(
        "optimizer",
        lambda config: (
            config.optimizer != "adam" and is_on(config, "use_precision_aware_optimizer")
        ),
        "with use_precision_aware_optimizer=True it is 'adam', as others take float32 weights and "
        "gradients alone; use that, or set it to False",
    ),
    _moment_dtype("exp_avg_dtype"),
    _moment_dtype("exp_avg_sq_dtype"),
    Rule(
        "optimizer_offload_fraction",
        lambda config: (
            is_on(config, CORES_OFFLOAD)
            and getattr(config, "optimizer_offload_fraction", 1.0) != 1.0
        ),
        "the state of all parameters is in host memory, or of none, as updates are streamed unit "
        f"by unit; use 1.0, or set {CORES_OFFLOAD} to False",
    ),
    off(
        "overlap_param_gather_with_optimizer_step",
        "it splits model chunks between two optimizers, and one holds all parameters here; set it "
        "to False",
    ),
    off(
        "optimizer_cuda_graph",
        "a graph of the optimizer's step took longer than the step without it, and was removed; "
        "set it to False",
    ),
    off(
        "use_layer_wise_distributed_optimizer",
        "it gives whole matrices to single ranks, and weights are sharded; set it to False",
    ),
    *MUON_RULES,
)
"""Of an optimizer's config and a DDP config as one."""
