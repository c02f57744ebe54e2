"""What of a Megatron model configuration is refused, and why. `docs/support.md` lists the same.

`Rule`s for the DDP config are in `ddp_options.py`; these are for the model and optimizer configs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .cuda_graphs import captures_iteration, captures_layers


@dataclass(frozen=True)
class Rule:
    """An option that is refused: `broken(ddp_config)` tells when, `message` why and the remedy."""

    option: str
    broken: Callable[[Any], bool]
    message: str


def is_on(config: Any, option: str) -> bool:
    """Whether `option` is there and set."""
    return bool(getattr(config, option, False))


def off(option: str, message: str) -> Rule:
    """`option` must not be on."""
    return Rule(option, lambda config: is_on(config, option), message)


def _is_not_none(option: str, message: str) -> Rule:
    return Rule(option, lambda config: getattr(config, option, None) is not None, message)


def _above_one(option: str, message: str) -> Rule:
    return Rule(option, lambda config: (getattr(config, option, None) or 1) > 1, message)


FP8_RECIPES = ("delayed", "tensorwise", "blockwise", "mxfp8")
FP4_RECIPES = ("nvfp4",)
NO_FP4_WEIGHTS = (
    "weights are not kept or gathered in NVFP4; leave it unset (--fp4-param-gather): weights are "
    "gathered in bf16 and Transformer Engine quantizes them in forward, with fp4 as it is"
)


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
            (getattr(config, "pipeline_model_parallel_size", None) or 1) > 1
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
    _is_not_none(
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
            and any((getattr(config, size, None) or 1) > 1 for size in sizes)
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
    _above_one("gtp_weight_remat_size", _REMAT),
    _above_one("expert_gtp_weight_remat_size", _REMAT),
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
        and (getattr(config, "pipeline_model_parallel_size", None) or 1) > 1,
        "core adds up the routers' whole gradients over pipeline stages, and they are sharded; use "
        "no pipeline parallelism, or set it to False",
    ),
)
"""Options that 0.16.1 does not have."""

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
)


def problems(config: Any, rules: tuple[Rule, ...]) -> list[str]:
    """One line for each broken rule: option, value, reason and remedy."""
    return [
        f"{rule.option}={_value(config, rule.option)!r}: {rule.message}"
        for rule in rules
        if rule.broken(config)
    ]


def _value(config: Any, option: str) -> Any:
    """The value of an option, which may be a dotted path."""
    return functools.reduce(lambda at, name: getattr(at, name, None), option.split("."), config)
