"""The arguments of an Adam kernel that takes many tensors in one launch: tables of addresses, and
numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

ALIGNED_BYTES = 16
"""Alignment of an address from which a thread can read 4 numbers at once."""
DTYPES = (torch.float32, torch.bfloat16)
CHUNK = 8192
"""Elements of a tensor that one program of the kernel updates."""
WEIGHTS = 1
"""Number of the list of weights. They do not move: other addresses are those of other weights."""
MOST_TABLES = 4096
"""Largest number of tables that are kept. No step needs as many; memory that moves again and again
would make more."""

Lists = Sequence[Sequence[torch.Tensor]]
"""Lists of tensors. The n-th tensors of all lists have the same number of elements."""
Addresses = tuple[tuple[int, ...], ...]
"""Addresses of tensors, by list."""
Sizes = tuple[int, ...]
"""Numbers of elements of the tensors, the same in each list."""
Places = tuple[Addresses, Sizes, torch.device, int]
"""Addresses, numbers of elements, and where tables are made: device and stream."""


@dataclass(frozen=True)
class TensorTable:
    """The addresses of tensors, on their device."""

    # int64, (lists + 1, n): of the tensors of each list, and the numbers of elements.
    addresses: torch.Tensor
    # int32, (chunks,): the tensor of each chunk.
    tensor_of: torch.Tensor
    # int32, (n,): the first chunk of each tensor.
    first_of: torch.Tensor
    # True if all addresses and numbers of elements are multiples of what a thread reads at once.
    aligned: bool


@dataclass(frozen=True)
class Update:
    """The inputs of an update of Adam beside tensors, as float32."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    correction1: float
    correction2: float
    # Whether weight decay is AdamW's.
    decoupled: bool
    weight_decay: float
    # One number on the device that gradients are multiplied by first; None for 1.
    clip: torch.Tensor | None = None


UpdateKernel = Callable[[TensorTable, Lists, Update], None]
"""Updates weights and moments in place. Lists: gradients, weights, first and second moments."""


def places_of(lists: Lists) -> Places:
    """The places that a table depends on. RuntimeError in a CUDA graph, which would go on reading a
    table that may be gone."""
    device = lists[0][0].device
    if is_capturing(device):
        raise RuntimeError(
            "optimizer.step() in a CUDA graph: its replays would read addresses of tensors "
            "that may have moved since. Take the step outside of the graph."
        )
    addresses = tuple(tuple(tensor.data_ptr() for tensor in tensors) for tensors in lists)
    sizes = tuple(tensor.numel() for tensor in lists[0])
    stream = torch.cuda.current_stream().cuda_stream if device.type == "cuda" else 0
    return addresses, sizes, device, stream


def table_of(
    chunks: Callable[..., Any],
    addresses: Addresses,
    sizes: Sizes,
    device: torch.device,
    stream: int,
) -> TensorTable:
    """The table of tensors at `addresses`, by list, of `sizes`. chunks: `chunks_on`, or a cache of
    it."""
    numbers = _to_device([*addresses, sizes], torch.int64, device)
    tensor_of, first_of = chunks(sizes, device, stream)
    return TensorTable(numbers, tensor_of, first_of, is_aligned(addresses, sizes))


def chunks_on(sizes: Sizes, device: torch.device, stream: int) -> tuple[torch.Tensor, ...]:
    """`TensorTable.tensor_of` and `first_of`. stream: for caches, as the copies are made on it."""
    return tuple(_to_device(row, torch.int32, device) for row in chunks_of(sizes, CHUNK))


def chunks_of(sizes: Sequence[int], chunk: int) -> tuple[list[int], list[int]]:
    """The tensor of each chunk, and the first chunk of each tensor."""
    tensor_of: list[int] = []
    first_of = []
    for number, size in enumerate(sizes):
        first_of.append(len(tensor_of))
        tensor_of += [number] * -(-size // chunk)
    return tensor_of, first_of


def is_aligned(addresses: Sequence[Sequence[int]], sizes: Sequence[int]) -> bool:
    """True if threads can read 16 bytes at a time, of numbers of 4 bytes or 2."""
    whole = ALIGNED_BYTES // DTYPES[1].itemsize
    if any(size % whole for size in sizes):
        return False
    return not any(address % ALIGNED_BYTES for row in addresses for address in row)


def is_capturing(device: torch.device) -> bool:
    """True if what is launched on the current stream goes into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _to_device(values: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Copies to the device without waiting for it."""
    made = torch.tensor(values, dtype=dtype, device="cpu")
    if device.type != "cuda":
        return made
    return made.pin_memory().to(device, non_blocking=True)
