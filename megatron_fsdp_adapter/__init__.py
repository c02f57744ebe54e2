"""Fully sharded data parallel for Megatron-Core.

Names are imported when they are first used: the runner has to put a script's folder on the path
before anything of megatron is imported.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .core.config import MixedPrecisionPolicy
    from .core.distributed_index import FSDPDistributedIndex
    from .launch.bridge import apply_fsdp_overrides
    from .launch.cpu_mode import enable_cpu_mode
    from .launch.installation import install, uninstall
    from .megatron.options.ddp_config import DistributedDataParallelConfig
    from .megatron.wrapper.adapter import FullyShardedDataParallel
    from .megatron.wrapper.process_groups import create_all_gather_groups
    from .plain.as_megatron_fsdp import use_as_megatron_fsdp
    from .plain.elastic import elastic_optimizer
    from .plain.fsdp2 import fully_shard
    from .plain.fully_shard import fully_shard_model
    from .plain.optimizer import fully_shard_optimizer
    from .plain.torch_fsdp import leave_fsdp2, use_as_fsdp2
    from .rollout.export import export_shards, export_weights
    from .rollout.release import release_memory, return_memory

__version__ = "0.1.0"

# Public name -> the module that defines it.
_HOMES = {
    "DistributedDataParallelConfig": "megatron.options.ddp_config",
    "FullyShardedDataParallel": "megatron.wrapper.adapter",
    "FSDPDistributedIndex": "core.distributed_index",
    "MixedPrecisionPolicy": "core.config",
    "apply_fsdp_overrides": "launch.bridge",
    "create_all_gather_groups": "megatron.wrapper.process_groups",
    "elastic_optimizer": "plain.elastic",
    "enable_cpu_mode": "launch.cpu_mode",
    "export_shards": "rollout.export",
    "export_weights": "rollout.export",
    "fully_shard": "plain.fsdp2",
    "fully_shard_model": "plain.fully_shard",
    "fully_shard_optimizer": "plain.optimizer",
    "install": "launch.installation",
    "leave_fsdp2": "plain.torch_fsdp",
    "release_memory": "rollout.release",
    "return_memory": "rollout.release",
    "uninstall": "launch.installation",
    "use_as_fsdp2": "plain.torch_fsdp",
    "use_as_megatron_fsdp": "plain.as_megatron_fsdp",
}

__all__ = [
    "DistributedDataParallelConfig",
    "FSDPDistributedIndex",
    "FullyShardedDataParallel",
    "MixedPrecisionPolicy",
    "apply_fsdp_overrides",
    "create_all_gather_groups",
    "elastic_optimizer",
    "enable_cpu_mode",
    "export_shards",
    "export_weights",
    "fully_shard",
    "fully_shard_model",
    "fully_shard_optimizer",
    "install",
    "leave_fsdp2",
    "release_memory",
    "return_memory",
    "uninstall",
    "use_as_fsdp2",
    "use_as_megatron_fsdp",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "megatron":
            raise
        raise ModuleNotFoundError(
            f"megatron_fsdp_adapter.{name}: megatron-core is not installed. Install "
            "megatron-fsdp-adapter[megatron].",
            name=error.name,
        ) from error
    globals()[name] = value
    return value
