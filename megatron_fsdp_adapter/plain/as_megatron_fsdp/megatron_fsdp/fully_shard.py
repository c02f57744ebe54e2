"""The functions that shard, and their classes."""

from megatron_fsdp_adapter.plain.megatron_fsdp import (
    MegatronFSDP,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
    fully_shard_model,
    fully_shard_optimizer,
)
from megatron_fsdp_adapter.plain.named_dims import NamedDimsIndex as FSDPDistributedIndex

__all__ = [
    "FSDPDistributedIndex", "MegatronFSDP", "MixedPrecisionPolicy", "ShardingStrategy",
    "fully_shard", "fully_shard_model", "fully_shard_optimizer",
]  # fmt: skip
