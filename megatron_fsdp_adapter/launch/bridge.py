"""Adapts a recipe of Megatron-Bridge to train with this package's wrapper.

A `ConfigContainer` is read and written by attribute: checking a recipe imports nothing of Megatron.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import MutableMapping
from typing import Any

import torch

from ..core.problems import raise_problems
from ..core.runtime.launcher import is_first_rank
from ..megatron.options.settings import (
    RECIPE,
    Change,
    Setting,
    format_changes,
    is_narrow,
    settle,
)
from ..megatron.options.table import (
    EXPERT_INSTANCES,
    EXPERT_OUTER,
    EXPERT_STRATEGY,
    GRAD_COMM,
    INSTANCES,
    OUTER,
    STRATEGY,
)
from ..megatron.options.validation import bridge_problems
from .megatron_lm import complete_environment


def apply_fsdp_overrides(
    cfg: Any,
    strategy: str = "optim_grads_params",
    *,
    outer_strategy: str | None = None,
    num_optimizer_instances: int | None = None,
    expert_strategy: str | None = None,
    expert_outer_strategy: str | None = None,
    num_expert_optimizer_instances: int | None = None,
    grad_comm_dtype: torch.dtype | None = None,
    environment: MutableMapping[str, str] | None = None,
) -> list[Change]:
    """Prepares a recipe of Megatron-Bridge for this package's wrapper, and installs the wrapper.

    Call it after all other overrides, and before `pretrain(cfg, ...)`. It sets the options that the
    wrapper needs, checks the recipe, and prints the changes with reasons on rank 0.

    Args:
        cfg: a `ConfigContainer` of Megatron-Bridge. It is changed.
        strategy: `data_parallel_sharding_strategy`: "no_shard", "optim", "optim_grads" or
            "optim_grads_params" (ZeRO-0 to ZeRO-3).
        outer_strategy: `outer_dp_sharding_strategy`. None keeps the recipe's value.
        num_optimizer_instances: `num_distributed_optimizer_instances`. None keeps the recipe's
            value.
        expert_strategy: `expert_data_parallel_sharding_strategy`. None keeps the recipe's value, by
            default that of all parameters.
        expert_outer_strategy: `expert_outer_dp_sharding_strategy`, with None as above.
        num_expert_optimizer_instances: `expert_num_distributed_optimizer_instances`, with None as
            above.
        grad_comm_dtype: dtype in which gradients are sent. None keeps the recipe's value, by
            default float32.
        environment: a mapping in which `CUDA_DEVICE_MAX_CONNECTIONS` is set if it is missing, by
            default `os.environ`.

    Returns:
        The changes: option, value before, value after, reason.

    Raises:
        ValueError: problems that remain after the changes, all in one message. `cfg` is changed
            already.
    """
    if environment is None:
        environment = os.environ
    asked = {
        STRATEGY: strategy,
        OUTER: outer_strategy,
        INSTANCES: num_optimizer_instances,
        EXPERT_STRATEGY: expert_strategy,
        EXPERT_OUTER: expert_outer_strategy,
        EXPERT_INSTANCES: num_expert_optimizer_instances,
        GRAD_COMM: grad_comm_dtype,
    }
    wanted = []  # what the caller asks for goes first: other settings follow from it
    for option, value in asked.items():
        if value is not None:
            wanted.append(Setting("ddp", option, value, "set by the caller", (RECIPE,)))
    changes = settle(RECIPE, sections_of(cfg), wanted)
    precision = getattr(cfg, "mixed_precision", None)
    if isinstance(precision, str) and is_narrow(cfg.ddp):
        # A name has no fields to change, so the config of that name takes its place.
        module = importlib.import_module("megatron.bridge.training.mixed_precision")
        cfg.mixed_precision = module.get_mixed_precision_config(precision)
    changes += settle(RECIPE, sections_of(cfg))
    changes += complete_environment(environment)
    if is_first_rank():
        print(format_changes("apply_fsdp_overrides sets", changes), flush=True)
    raise_problems("The recipe with FullyShardedDataParallel", bridge_problems(cfg, environment))

    _install(cfg)
    return changes


def _install(cfg: Any) -> None:
    """Installs the wrapper for a recipe, after the recipe is checked."""
    from .installation import install  # imports Megatron; checking a recipe does not

    if type(cfg).__module__.startswith("megatron.bridge."):
        # Base weights of adapters are loaded before the wrapper is constructed. So their loader is
        # imported now, for `install` to rebind names in it.
        importlib.import_module("megatron.bridge.training.checkpointing")
    install()


def sections_of(cfg: Any) -> dict[str, Any]:
    """The recipe's configs in which options are set."""
    names = ("ddp", "optimizer", "dist", "checkpoint", "mixed_precision")
    return {name: getattr(cfg, name, None) for name in names}
