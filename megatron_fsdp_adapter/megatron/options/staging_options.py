"""Options of fixed and registered buffers, read from the DDP config.

| option | weights | buckets | memory |
|---|---|---|---|
| none | come and go | come and go | caching allocator |
| `fsdp_double_buffer` | slots | slots | caching allocator |
| `megatron_fsdp_max_pool_double_buffer` | slots | slots | caching allocator |
| `nccl_ub` | slots | slots | NCCL's allocator, registered |
| `fsdp_copy_engine_all_gather` | slots | as the other options say | NCCL's, symmetric, zero CTAs |
| `fsdp_copy_engine_reduce_scatter` | as the others say | slots and one for pieces | the same |
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from ...core.config import STRATEGIES
from ...core.runtime.registered import RegisteredMemory
from ...core.topology import FSDPDistributedIndex
from .support import is_on

CE_ALL_GATHER = "fsdp_copy_engine_all_gather"
CE_REDUCE_SCATTER = "fsdp_copy_engine_reduce_scatter"
"""An all-to-all by the copy engines, after which this package sums."""

ROLES = {CE_ALL_GATHER: "ag", CE_REDUCE_SCATTER: "rs"}
"""Option -> end of the role of the groups that the wrapper makes for it."""


FIXED = ("fsdp_double_buffer", "megatron_fsdp_max_pool_double_buffer", "nccl_ub")
"""Options that put weights and buckets in slots. Core of 0.19 sets the first with the second, which
is about units of different sizes; slots are as large as the largest unit in any case."""


def copy_engine_roles(ddp_config: Any) -> list[str]:
    """What the copy engines do: gathers ("ag"), reductions ("rs"). Each is on communicators of its
    own, with NCCL's zero-CTA policy: on one they would wait for each other."""
    return [suffix for option, suffix in ROLES.items() if is_on(ddp_config, option)]


def slots_wanted(ddp_config: Any) -> dict[str, bool]:
    """The fields of `EngineConfig` about slots."""
    fixed = any(is_on(ddp_config, option) for option in FIXED)
    carried = is_on(ddp_config, CE_REDUCE_SCATTER)
    return {
        "weight_slots": fixed or is_on(ddp_config, CE_ALL_GATHER),
        "bucket_slots": fixed or carried,
        "all_to_all_gradients": carried,
    }


def problems(ddp_config: Any, device: torch.device, groups: Any) -> list[str]:
    """One line for each option that cannot work on `device` with `groups`, by role."""
    row = STRATEGIES.get(ddp_config.data_parallel_sharding_strategy)
    found = []
    for option in ("nccl_ub", *ROLES):
        if not is_on(ddp_config, option):
            continue
        if device.type != "cuda":
            found.append(f"{option}=True: it needs NCCL, and the model is on {device}; set False")
        if "expandable_segments:True" in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""):
            found.append(
                f"{option}=True: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True excludes memory "
                "pools; leave that setting out, or set this to False"
            )
    gathers, carries = is_on(ddp_config, CE_ALL_GATHER), is_on(ddp_config, CE_REDUCE_SCATTER)
    if carries and row is not None and not row.shard_grads:
        found.append(
            f"{CE_REDUCE_SCATTER}=True with data_parallel_sharding_strategy={row.name!r}: "
            "gradients are reduced where they are kept; use 'optim_grads' or 'optim_grads_params', "
            "or set it to False"
        )
    if gathers and row is not None and not row.shard_weights:
        found.append(
            f"{CE_ALL_GATHER}=True with data_parallel_sharding_strategy={row.name!r}: weights are "
            "kept, and gathered once a step; use 'optim_grads_params', or set it to False"
        )
    if gathers and any(
        groups.get(role) is not None for role in ("fsdp_group_ag", "expt_fsdp_group_ag")
    ):
        found.append(
            f"{CE_ALL_GATHER}=True: pg_collection has gather groups of its own (dp_cp_ag, "
            "expt_dp_ag), which take compute units; leave them out: the wrapper makes others"
        )
    for option in ("fsdp_manual_registration", "disable_symmetric_registration"):
        if is_on(ddp_config, option) and not is_on(ddp_config, "nccl_ub"):
            found.append(f"{option}=True: it is about nccl_ub, which is off; set nccl_ub=True")
    return found


def slot_memory(
    ddp_config: Any, index: FSDPDistributedIndex, device: torch.device
) -> RegisteredMemory | None:
    """What allocates slots; None for ordinary memory. Copy engines need symmetric memory, so
    `disable_symmetric_registration` is about `nccl_ub` alone."""
    registers, roles = is_on(ddp_config, "nccl_ub"), copy_engine_roles(ddp_config)
    groups: list[dist.ProcessGroup] = []
    for domain in index.domains.values():
        groups += [domain.gather_group] if registers or "ag" in roles else []
        groups += [domain.reduce_group] if registers or "rs" in roles else []
    groups = [group for group in groups if dist.get_world_size(group) > 1]
    if not groups:
        return None
    return RegisteredMemory(
        groups,
        device,
        symmetric=bool(roles) or not is_on(ddp_config, "disable_symmetric_registration"),
        at_once=not is_on(ddp_config, "fsdp_manual_registration"),
    )
