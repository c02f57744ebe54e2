"""What of a Megatron model configuration is refused, and why. `docs/support.md` lists the same.

`Rule`s for the DDP config are in `ddp_options.py`; these are for the model and optimizer configs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .cuda_graphs import captures_iteration


@dataclass(frozen=True)
class Rule:
    """An option that is refused: `broken(ddp_config)` tells when, `message` why and the remedy."""

    option: str
    broken: Callable[[Any], bool]
    message: str


def _is_on(option: str, message: str) -> Rule:
    return Rule(option, lambda config: bool(getattr(config, option, False)), message)


FP8_RECIPES = ("delayed", "tensorwise")


MODEL_CONFIG_RULES: tuple[Rule, ...] = (
    _is_on("fp8_param", "FP8 parameters are coming; set it to False (FP8 compute is not refused)"),
    Rule(
        "fp8_recipe",
        lambda config: bool(getattr(config, "fp8", None))
        and getattr(config, "fp8_recipe", "delayed") not in FP8_RECIPES,
        f"FP8 compute is supported with the recipes {list(FP8_RECIPES)}; use one of them",
    ),
    _is_on("fp4", "FP4 compute is coming; leave it unset"),
    Rule(
        "cuda_graph_impl",
        lambda config: (
            getattr(config, "cuda_graph_impl", "none") not in (None, "none")
            and not captures_iteration(config)
        ),
        "captured layers do not run the hooks that gather weights; set it to 'none', or to 'local' "
        "with cuda_graph_scope='full_iteration'",
    ),
    _is_on("enable_cuda_graph", "captured layers do not run the hooks that gather weights"),
    _is_on("external_cuda_graph", "captured layers do not run the hooks that gather weights"),
    _is_on("cpu_offloading", "activation offload to the CPU is coming; set it to False"),
    _is_on(
        "fine_grained_activation_offloading", "activation offload is coming; set it to False"
    ),
    _is_on(
        "overlap_moe_expert_parallel_comm",
        "its schedule calls parts of layers directly; set it to False",
    ),
    Rule(
        "moe_token_dispatcher_type",
        lambda config: bool(getattr(config, "num_moe_experts", None))
        and getattr(config, "moe_token_dispatcher_type", None) == "flex",
        "its kernels communicate on streams of their own and were never run with this wrapper; use "
        "'alltoall' or 'allgather'",
    ),
    _is_on("delay_wgrad_compute", "delayed weight gradients are coming; set it to False"),
    _is_on(
        "defer_embedding_wgrad_compute",
        "the output layer's weights are resharded before its deferred gradient; set it to False",
    ),
    _is_on("qk_clip", "it writes raw weights after the step; set it to False"),
    _is_on(
        "hybrid_context_parallel", "its schedule changes groups between batches; set it to False"
    ),
)


def _moment_dtype(option: str) -> Rule:
    return Rule(
        option,
        lambda config: (
            getattr(config, option, torch.float32) not in (torch.float32, torch.bfloat16)
        ),
        "the scales of fp16 and fp8 moments would not be in a checkpoint; use torch.float32 or "
        "torch.bfloat16",
    )


OPTIMIZER_CONFIG_RULES: tuple[Rule, ...] = (
    Rule(
        "optimizer",
        lambda config: config.optimizer != "adam",
        "megatron-core's DistributedOptimizer takes only Adam; use 'adam'",
    ),
    _moment_dtype("exp_avg_dtype"),
    _moment_dtype("exp_avg_sq_dtype"),
    _is_on("optimizer_cpu_offload", "optimizer offload to the CPU is coming; set it to False"),
    _is_on(
        "overlap_param_gather_with_optimizer_step",
        "one optimizer holds all parameters here, so there is no second step to overlap with; "
        "weights are gathered under the forward pass; set it to False",
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


def raise_problems(subject: str, found: list[str]) -> None:
    """One ValueError with every line of `found`, if there is any."""
    if found:
        lines = "\n".join(f"  - {line}" for line in found)
        raise ValueError(f"{subject} cannot be used with this configuration:\n{lines}")
