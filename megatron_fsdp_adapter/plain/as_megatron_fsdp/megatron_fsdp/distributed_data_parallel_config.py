"""The config of Megatron's DDP."""

from megatron_fsdp_adapter import DistributedDataParallelConfig

__all__ = ["DistributedDataParallelConfig"]
