"""Options of fixed and registered buffers, read from the DDP config.

| option | weights | buckets | memory |
|---|---|---|---|
| none | allocated when used | allocated when used | caching allocator |
| `fsdp_double_buffer` | slots | slots | caching allocator |
| `megatron_fsdp_max_pool_double_buffer` | slots | slots | caching allocator |
| `nccl_ub` | slots | slots | NCCL's allocator, registered |
| `fsdp_copy_engine_all_gather` | slots | by the other options | NCCL's, symmetric, zero CTAs |
| `fsdp_copy_engine_reduce_scatter` | by the others | slots and one for pieces | the same |

A slot is a buffer that is allocated once and that units take in turn.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ...core.comm.communicator import REDUCE_SCATTER
from ...core.comm.registered import RegisteredMemory
from ...core.distributed_index import FSDPDistributedIndex
from .rules import is_on
from .table import CE_ALL_GATHER, CE_REDUCE_SCATTER, engine_fields, strategies_by_kind

ROLES = {CE_ALL_GATHER: "ag", CE_REDUCE_SCATTER: "rs"}
"""Option -> suffix of the role of the groups that the wrapper makes for it."""
SHARDED = {"ag": "shard_weights", "rs": "shard_grads"}
"""Suffix -> field of `Strategy`: what has to be sharded, so that there is such a collective."""


def copy_engine_roles(ddp_config: Any, kind: str) -> list[str]:
    """The collectives of a kind of parameters that run on copy engines: gathers ("ag"), reductions
    ("rs"). Each of the two gets communicators of its own, with NCCL's zero-CTA policy: on one they
    would wait for each other."""
    row = strategies_by_kind(ddp_config)[kind]
    found = []
    for option, suffix in ROLES.items():
        if is_on(ddp_config, option) and getattr(row, SHARDED[suffix]):
            found.append(suffix)
    return found


# The fields of `EngineConfig` about slots, with their values if no option sets them.
NO_SLOTS = {"weight_slots": False, "bucket_slots": False, "reduce_scatter": REDUCE_SCATTER}


def slots_wanted(ddp_config: Any) -> dict[str, Any]:
    """The fields of `EngineConfig` about slots, and the reduction that may need one."""
    fields = engine_fields(ddp_config)
    return {name: fields.get(name, default) for name, default in NO_SLOTS.items()}


def slot_memory(
    ddp_config: Any, index: FSDPDistributedIndex, device: torch.device
) -> RegisteredMemory | None:
    """The allocator of slots; None for ordinary memory. Copy engines need symmetric memory, so
    `disable_symmetric_registration` applies to `nccl_ub` only."""
    registers = is_on(ddp_config, "nccl_ub")
    is_copied = any(is_on(ddp_config, option) for option in ROLES)
    groups: list[dist.ProcessGroup] = []
    for kind, domain in index.domains.items():
        roles = copy_engine_roles(ddp_config, kind)
        if registers or "ag" in roles:
            groups.append(domain.gather_group)
        if registers or "rs" in roles:
            groups.append(domain.reduce_group)
    groups = [group for group in groups if dist.get_world_size(group) > 1]
    if not groups:
        return None
    return RegisteredMemory(
        groups,
        device,
        symmetric=is_copied or not is_on(ddp_config, "disable_symmetric_registration"),
        at_once=not is_on(ddp_config, "fsdp_manual_registration"),
    )
