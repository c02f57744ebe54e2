"""The `fsdp_dtensor` format: chunks from the layout, names of the whole model, safe folders.

Imports no Megatron. Code that reads, writes or converts a checkpoint belongs here.
"""

from megatron_fsdp_adapter.checkpoint.asynchronous import AsyncSaver
from megatron_fsdp_adapter.checkpoint.coordination import CheckpointError
from megatron_fsdp_adapter.checkpoint.dcp import latest_iteration, load_checkpoint, save_checkpoint
from megatron_fsdp_adapter.checkpoint.state import PerRank
from megatron_fsdp_adapter.checkpoint.training import (
    load_model_state,
    load_training_state,
    model_state,
    training_state,
)

__all__ = [
    "AsyncSaver",
    "CheckpointError",
    "PerRank",
    "latest_iteration",
    "load_checkpoint",
    "load_model_state",
    "load_training_state",
    "model_state",
    "save_checkpoint",
    "training_state",
]
