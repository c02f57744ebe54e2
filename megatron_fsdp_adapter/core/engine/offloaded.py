"""Tensors in host memory that are brought to the device one unit after the other.

Main weights and optimizer state of a group each are a flat tensor in host memory, which
checkpoints, loads and exports see. An optimizer updates its *device buffer*, a flat buffer on
the device that has storage only between `load` and `release`. Views of both are made once.

The other design left the device tensors visible, and hid copies in host memory:
whatever reads a main weight between two steps would have had to bring it back first.
"""

from __future__ import annotations

import torch

from megatron_fsdp_adapter.core.layout.group import ShardSpec
from megatron_fsdp_adapter.core.runtime.device import Runtime

from .buffer import ShardedBuffer


class OffloadedBuffer:
    """A buffer in host memory (`host`), zero, of the shard `held` of a group, and its device buffer
    (`device_buffer`), released."""

    def __init__(self, held: ShardSpec, dtype: torch.dtype, runtime: Runtime) -> None:
        memory = runtime.host_memory(held.layout.shard_numel * dtype.itemsize)
        self.host = ShardedBuffer(held, [held], runtime, dtype, memory=memory, is_zero=True)
        self.device_buffer = ShardedBuffer(held, [held], runtime, dtype)
        self.device_buffer.release()

    def load(self) -> None:
        """Brings the values to the device, on the current stream."""
        self.device_buffer.allocate()
        self.device_buffer.tensor.copy_(self.host.tensor, non_blocking=True)

    def store(self) -> None:
        """Takes them back to host memory, on the current stream."""
        self.host.tensor.copy_(self.device_buffer.tensor, non_blocking=True)
