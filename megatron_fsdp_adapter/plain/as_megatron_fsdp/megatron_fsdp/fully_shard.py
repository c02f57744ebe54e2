"""The functions that shard, and their classes."""

from megatron_fsdp_adapter.plain.megatron_fsdp import (
    FSDPDistributedIndex,
    MegatronFSDP,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
    fully_shard_model,
    fully_shard_optimizer,
)

__all__ = [
    "FSDPDistributedIndex", "MegatronFSDP", "MixedPrecisionPolicy", "ShardingStrategy",
    "fully_shard", "fully_shard_model", "fully_shard_optimizer",
]  # fmt: skip
