"""`fsdp_dtensor` checkpoints: chunks from the layout, safe folders, and Megatron's helper names."""

from megatron_fsdp_adapter.checkpoint.asynchronous import AsyncSaver
from megatron_fsdp_adapter.checkpoint.coordination import CheckpointError
from megatron_fsdp_adapter.checkpoint.dcp import latest_iteration, load_checkpoint, save_checkpoint
from megatron_fsdp_adapter.checkpoint.state import PerRank

__all__ = [
    "AsyncSaver",
    "CheckpointError",
    "PerRank",
    "latest_iteration",
    "load_checkpoint",
    "save_checkpoint",
]
