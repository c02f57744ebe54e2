"""Tensors in host memory that are brought to the device one unit after the other.

Main weights and optimizer state of a group each are a flat tensor in host memory, which
checkpoints, loads and exports see. An optimizer updates its *device buffer*, a flat buffer on
the device that has storage only between `load` and `release`. Views of both are made once.

The other design left the device tensors visible, and hid copies in host memory:
whatever reads a main weight between two steps would have had to bring it back first.
"""

from __future__ import annotations

import torch

from megatron_fsdp_adapter.core.runtime.device import Runtime

from .buffer import FlatBuffer, Held, items_in, segments_in


class OffloadedBuffer:
    """A flat tensor in host memory, zero, of the part `held` of a group, and its device buffer,
    released.

    Attributes:
        host, device_buffer: the two flat buffers.
        host_items, device_items: this rank's rows of each parameter of the group.
        device_segments: `held` of each segment.
    """

    def __init__(self, held: Held, dtype: torch.dtype, runtime: Runtime) -> None:
        numel = held.layout.shard_numel
        memory = runtime.host_memory(numel * dtype.itemsize)
        self.host = FlatBuffer(numel, dtype, runtime, memory, is_zero=True)
        self.host_items = items_in(self.host, held, held)
        self.device_buffer = FlatBuffer(numel, dtype, runtime)
        self.device_items = items_in(self.device_buffer, held, held)
        self.device_segments = segments_in(self.device_buffer, held, held)
        self.device_buffer.release()

    def load(self) -> None:
        """Brings the values to the device, on the current stream."""
        self.device_buffer.allocate()
        self.device_buffer.tensor.copy_(self.host.tensor, non_blocking=True)

    def store(self) -> None:
        """Takes them back to host memory, on the current stream."""
        self.host.tensor.copy_(self.device_buffer.tensor, non_blocking=True)
