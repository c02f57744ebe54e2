"""Fully sharded data parallel for Megatron-Core.

Names are imported when they are first used: the runner has to put a script's folder on the path
before anything of megatron is imported.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .adapter import FullyShardedDataParallel
    from .bridge import apply_fsdp_overrides
    from .config import MixedPrecisionPolicy
    from .cpu_mode import enable_cpu_mode
    from .ddp_config import DistributedDataParallelConfig
    from .fully_shard import fully_shard_model, fully_shard_optimizer
    from .installation import install, uninstall
    from .process_groups import create_all_gather_groups
    from .topology import FSDPDistributedIndex

__version__ = "0.1.0"

_HOMES = {
    "DistributedDataParallelConfig": "ddp_config",
    "FullyShardedDataParallel": "adapter",
    "FSDPDistributedIndex": "topology",
    "MixedPrecisionPolicy": "config",
    "apply_fsdp_overrides": "bridge",
    "create_all_gather_groups": "process_groups",
    "enable_cpu_mode": "cpu_mode",
    "fully_shard_model": "fully_shard",
    "fully_shard_optimizer": "fully_shard",
    "install": "installation",
    "uninstall": "installation",
}

__all__ = [
    "DistributedDataParallelConfig",
    "FSDPDistributedIndex",
    "FullyShardedDataParallel",
    "MixedPrecisionPolicy",
    "apply_fsdp_overrides",
    "create_all_gather_groups",
    "enable_cpu_mode",
    "fully_shard_model",
    "fully_shard_optimizer",
    "install",
    "uninstall",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value
