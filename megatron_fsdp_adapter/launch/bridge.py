"""A recipe of Megatron-Bridge, turned into one that trains with this package's wrapper.

A `ConfigContainer` is read and written by attribute: checking a recipe imports nothing of Megatron.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch

from ..core.config import STRATEGIES, forced_overlaps
from ..megatron.options.ddp_options import OFFLOAD
from ..megatron.options.settings import Change, format_changes
from ..megatron.options.support import CORES_OFFLOAD, streams_all
from ..megatron.options.validation import CKPT_FORMAT, bridge_problems
from ..sharding.problems import raise_problems
from .megatron_lm import complete_environment

_REASONS: Mapping[str, str] = {
    "dist.use_megatron_fsdp": "one of the two switches: Megatron-Bridge's launch reads this one",
    "ddp.use_megatron_fsdp": "the other: the wrapper, optimizer and checkpoints read this one",
    "ddp.use_distributed_optimizer": "the optimizer is Megatron's DistributedOptimizer",
    "optimizer.use_distributed_optimizer": "the same, as the optimizer reads it",
    "ddp.data_parallel_sharding_strategy": "as asked for",
    "ddp.outer_dp_sharding_strategy": "as asked for",
    "ddp.num_distributed_optimizer_instances": "as asked for",
    "ddp.megatron_fsdp_grad_comm_dtype": "as asked for",
    "ddp.grad_reduce_in_fp32": "it asks for float32, and grad_comm_dtype for another",
    "mixed_precision.grad_reduce_in_fp32": "from there it would be set again",
    "ddp.overlap_grad_reduce": "sharded gradients are reduced as each unit's backward ends",
    "ddp.overlap_param_gather": "sharded weights are gathered under the unit in front",
    "ddp.average_in_collective": "Megatron-Bridge refuses it; sums are scaled after the reduction",
    "ddp.reuse_grad_buf_for_mxfp8_param_ag": "there is no such buffer",
    "optimizer.reuse_grad_buf_for_mxfp8_param_ag": "there is no such buffer",
    "ddp.chunked_optimizer_state_offload": "what optimizer_cpu_offload asks for",
    "optimizer.optimizer_cpu_offload": "megatron-core would make one that updates on the CPU",
    "checkpoint.ckpt_format": "the format of sharded weights",
}


def apply_fsdp_overrides(
    cfg: Any,
    strategy: str = "optim_grads_params",
    *,
    outer_strategy: str | None = None,
    num_optimizer_instances: int | None = None,
    grad_comm_dtype: torch.dtype | None = None,
    environment: MutableMapping[str, str] | None = None,
) -> list[Change]:
    """Sets what a recipe needs to train with `FullyShardedDataParallel`, checks it and installs.

    Call it on the finished config, after all other overrides and before `pretrain(cfg, ...)`. It
    prints on rank 0 what it set and why.

    Args:
        cfg: a `ConfigContainer` of Megatron-Bridge; it is changed.
        strategy: `data_parallel_sharding_strategy`: no_shard, optim, optim_grads or
            optim_grads_params (ZeRO 0 to 3).
        outer_strategy: `outer_dp_sharding_strategy`; None leaves what the recipe says.
        num_optimizer_instances: `num_distributed_optimizer_instances`; None leaves it.
        grad_comm_dtype: dtype of gradients on the wire; None leaves it, which means float32.
        environment: where `CUDA_DEVICE_MAX_CONNECTIONS` is set if it is not; by default the
            process's own.

    Returns: what was set.

    Raises:
        ValueError: what cannot be set right for the user, all of it in one message.
    """
    environment = os.environ if environment is None else environment
    wanted = {
        **_always(strategy),
        "ddp.outer_dp_sharding_strategy": outer_strategy,
        "ddp.num_distributed_optimizer_instances": num_optimizer_instances,
        "ddp.megatron_fsdp_grad_comm_dtype": grad_comm_dtype,
        **_low_precision_gradients(cfg, grad_comm_dtype or _own_comm_dtype(cfg)),
        **_streamed_optimizer(cfg),
    }
    changes = [
        change
        for path, value in wanted.items()
        if value is not None and (change := _set(cfg, path, value)) is not None
    ]
    changes += complete_environment(environment)
    if int(os.environ.get("RANK", "0")) == 0:
        print(format_changes("apply_fsdp_overrides sets", changes), flush=True)
    raise_problems("The recipe with FullyShardedDataParallel", bridge_problems(cfg, environment))

    from .installation import install  # imports Megatron, which checking a recipe does not need

    if type(cfg).__module__.startswith("megatron.bridge."):
        # Base weights of adapters are loaded before a wrapper is made, which installs the rest.
        importlib.import_module("megatron.bridge.training.checkpointing")
    install()
    return changes


def _always(strategy: str) -> dict[str, Any]:
    """What is set whatever the recipe says: paths in the container and values.

    Not `model.gradient_accumulation_fusion`: a Megatron-Bridge that does not allow it with this
    wrapper, as 0.3.1, switches it off by itself when training starts.
    """
    wanted: dict[str, Any] = {
        "dist.use_megatron_fsdp": True,
        "ddp.use_megatron_fsdp": True,
        "ddp.use_distributed_optimizer": True,
        "optimizer.use_distributed_optimizer": True,
        "ddp.data_parallel_sharding_strategy": strategy,
        "ddp.average_in_collective": False,
        "ddp.reuse_grad_buf_for_mxfp8_param_ag": False,
        "optimizer.reuse_grad_buf_for_mxfp8_param_ag": False,
        "checkpoint.ckpt_format": CKPT_FORMAT,
    }
    row = STRATEGIES.get(strategy)
    forced = {} if row is None else forced_overlaps(row)
    return {**wanted, **{f"ddp.{option}": value for option, value in forced.items()}}


def _own_comm_dtype(cfg: Any) -> torch.dtype | None:
    """What the recipe itself says. Recipes of Megatron-Bridge that say it leave grad_reduce_in_fp32
    on, which megatron-core's own FSDP from 0.18 on does not read."""
    return getattr(cfg.ddp, "megatron_fsdp_grad_comm_dtype", None)


def _low_precision_gradients(cfg: Any, dtype: torch.dtype | None) -> dict[str, Any]:
    """What else must change for gradients that are not communicated in float32. A recipe may name
    its mixed precision; only the config behind that name can be changed."""
    if dtype in (None, torch.float32):
        return {}
    wanted: dict[str, Any] = {"ddp.grad_reduce_in_fp32": False}
    if isinstance(getattr(cfg, "mixed_precision", None), str):
        module = importlib.import_module("megatron.bridge.training.mixed_precision")
        cfg.mixed_precision = module.get_mixed_precision_config(cfg.mixed_precision)
    if getattr(cfg, "mixed_precision", None) is not None:
        wanted["mixed_precision.grad_reduce_in_fp32"] = False
    return wanted


def _streamed_optimizer(cfg: Any) -> dict[str, Any]:
    """Core's offload of the optimizer is ours, where it is supported."""
    if not streams_all(cfg.optimizer):
        return {}
    return {f"ddp.{OFFLOAD}": True, f"optimizer.{CORES_OFFLOAD}": False}


def _set(cfg: Any, path: str, value: Any) -> Change | None:
    """Sets one option; None if it was so before."""
    section, name = path.split(".")
    owner = getattr(cfg, section)
    before = getattr(owner, name, None)
    if before == value:
        return None
    setattr(owner, name, value)
    return Change(path, before, value, _REASONS[path])
