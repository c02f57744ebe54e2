"""Options of fixed and registered buffers, read from the DDP config.

| option | weights | buckets | memory |
|---|---|---|---|
| none | come and go | come and go | caching allocator |
| `fsdp_double_buffer` | slots | slots | caching allocator |
| `nccl_ub` | slots | slots | NCCL's allocator, registered |
| `fsdp_copy_engine_all_gather` | slots | as the other options say | NCCL's, symmetric, zero CTAs |
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from .config import STRATEGIES
from .runtime.registered import RegisteredMemory
from .topology import FSDPDistributedIndex

COPY_ENGINES = "fsdp_copy_engine_all_gather"


def _is_on(ddp_config: Any, option: str) -> bool:
    return bool(getattr(ddp_config, option, False))


def uses_copy_engines(ddp_config: Any) -> bool:
    return _is_on(ddp_config, COPY_ENGINES)


def slots_wanted(ddp_config: Any) -> dict[str, bool]:
    """The fields of `EngineConfig` about slots."""
    fixed = _is_on(ddp_config, "fsdp_double_buffer") or _is_on(ddp_config, "nccl_ub")
    return {"weight_slots": fixed or uses_copy_engines(ddp_config), "bucket_slots": fixed}


def problems(ddp_config: Any, device: torch.device, groups: Any) -> list[str]:
    """One line for each option that cannot work on `device` with `groups`, by role."""
    row = STRATEGIES.get(ddp_config.data_parallel_sharding_strategy)
    found = []
    for option in ("nccl_ub", COPY_ENGINES):
        if not _is_on(ddp_config, option):
            continue
        if device.type != "cuda":
            found.append(f"{option}=True: it needs NCCL, and the model is on {device}; set False")
        if "expandable_segments:True" in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""):
            found.append(
                f"{option}=True: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True excludes memory "
                "pools; leave that setting out, or set this to False"
            )
    if uses_copy_engines(ddp_config) and row is not None and not row.shard_weights:
        found.append(
            f"{COPY_ENGINES}=True with data_parallel_sharding_strategy={row.name!r}: weights are "
            "kept, and gathered once a step; use 'optim_grads_params', or set it to False"
        )
    if uses_copy_engines(ddp_config) and any(
        groups.get(role) is not None for role in ("fsdp_group_ag", "expt_fsdp_group_ag")
    ):
        found.append(
            f"{COPY_ENGINES}=True: pg_collection has gather groups of its own (dp_cp_ag, "
            "expt_dp_ag), which take compute units; leave them out: the wrapper makes others"
        )
    for option in ("fsdp_manual_registration", "disable_symmetric_registration"):
        if _is_on(ddp_config, option) and not _is_on(ddp_config, "nccl_ub"):
            found.append(f"{option}=True: it is about nccl_ub, which is off; set nccl_ub=True")
    return found


def slot_memory(
    ddp_config: Any, index: FSDPDistributedIndex, device: torch.device
) -> RegisteredMemory | None:
    """What allocates slots; None for ordinary memory. Copy engines need symmetric memory, so
    `disable_symmetric_registration` is about `nccl_ub` alone."""
    by_copy_engines = uses_copy_engines(ddp_config)
    if not by_copy_engines and not _is_on(ddp_config, "nccl_ub"):
        return None
    groups: list[dist.ProcessGroup] = []
    for domain in index.domains.values():
        reduces = [domain.reduce_group] if _is_on(ddp_config, "nccl_ub") else []
        groups += [g for g in (domain.gather_group, *reduces) if dist.get_world_size(g) > 1]
    if not groups:
        return None
    return RegisteredMemory(
        groups,
        device,
        symmetric=by_copy_engines or not _is_on(ddp_config, "disable_symmetric_registration"),
        at_once=not _is_on(ddp_config, "fsdp_manual_registration"),
    )
