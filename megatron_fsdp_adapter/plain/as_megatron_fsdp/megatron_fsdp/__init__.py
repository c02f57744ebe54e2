"""The names of the package `megatron_fsdp`, from megatron_fsdp_adapter."""

from typing import Any

from . import uneven_dtensor as uneven_dtensor
from .fully_shard import fully_shard, fully_shard_model, fully_shard_optimizer
from .megatron_fsdp import MegatronFSDP, ShardingStrategy
from .mixed_precision import MixedPrecisionPolicy
from .package_info import __package_name__, __shortversion__, __version__
from .utils import FSDPDistributedIndex

__all__ = [
    "FSDPDistributedIndex", "MegatronFSDP", "MixedPrecisionPolicy", "ShardingStrategy",
    "__package_name__", "__shortversion__", "__version__", "fully_shard", "fully_shard_model",
    "fully_shard_optimizer",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """The config of Megatron's DDP, which takes megatron-core to import."""
    if name == "DistributedDataParallelConfig":
        from .distributed_data_parallel_config import DistributedDataParallelConfig

        return DistributedDataParallelConfig
    raise AttributeError(f"module {__name__!r}, of megatron_fsdp_adapter, has no {name!r}")
