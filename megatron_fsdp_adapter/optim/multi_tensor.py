"""The arguments of an Adam kernel that takes many tensors in one launch: tables of addresses, and
numbers."""

from __future__ import annotations

import itertools
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
"""Their place among the lists. They stay where they are: others have tables of their own."""
MOST_TABLES = 4096
"""Number of tables that are kept: of more calls than a step has, for memory that moves again and
again."""

Lists = Sequence[Sequence[torch.Tensor]]
"""Lists of tensors; those at one place in them have as many elements."""
Addresses = tuple[tuple[int, ...], ...]
"""Addresses of tensors, by list."""
Places = tuple[Addresses, tuple[int, ...], torch.device, int]
"""Addresses, numbers of elements, and where tables are made: device and stream."""


@dataclass(frozen=True)
class Table:
    """The addresses of tensors, on their device. addresses: int64 (lists + 1, n): of the tensors of
    each list, and the numbers of elements; tensor_of: int32 (chunks): the tensor of each chunk;
    first_of: int32 (n): the first chunk of each tensor. aligned: True if all addresses and numbers
    of elements are multiples of what a thread reads at once."""

    addresses: torch.Tensor
    tensor_of: torch.Tensor
    first_of: torch.Tensor
    aligned: bool


@dataclass(frozen=True)
class Update:
    """The inputs of an update of Adam beside tensors, as float32. clip: one number on the device
    that gradients are multiplied by first; None for 1. decoupled: weight decay is AdamW's."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    correction1: float
    correction2: float
    decoupled: bool
    weight_decay: float
    clip: torch.Tensor | None = None


Kernel = Callable[[Table, Lists, Update], None]
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
    stream = torch.cuda.current_stream().cuda_stream if device.type == "cuda" else 0
    return addresses, tuple(tensor.numel() for tensor in lists[0]), device, stream


def table_of(
    chunks: Callable[..., Any], addresses: Addresses, sizes: tuple[int, ...], device: torch.device,
    stream: int,
) -> Table:  # fmt: skip
    """The table of tensors at `addresses`, by list, of `sizes`. chunks: `chunks_on`."""
    where = _to_device([*addresses, sizes], torch.int64, device)
    tensor_of, first_of = chunks(sizes, device, stream)
    return Table(where, tensor_of, first_of, is_aligned(addresses, sizes))


def chunks_on(
    sizes: tuple[int, ...], device: torch.device, stream: int
) -> tuple[torch.Tensor, ...]:
    """`Table.tensor_of` and `Table.first_of`."""
    return tuple(_to_device(row, torch.int32, device) for row in chunks_of(sizes, CHUNK))


def chunks_of(sizes: Sequence[int], chunk: int) -> tuple[list[int], list[int]]:
    """The tensor of each chunk, and the first chunk of each tensor."""
    counts = [-(-size // chunk) for size in sizes]
    tensor_of = [number for number, count in enumerate(counts) for _ in range(count)]
    return tensor_of, list(itertools.accumulate(counts, initial=0))[:-1]


def is_aligned(addresses: Sequence[Sequence[int]], sizes: Sequence[int]) -> bool:
    """True if threads can read 16 bytes at a time, of numbers of 4 bytes or 2."""
    whole = all(size % (ALIGNED_BYTES // DTYPES[1].itemsize) == 0 for size in sizes)
    return whole and not any(a % ALIGNED_BYTES for some in addresses for a in some)


def is_capturing(device: torch.device) -> bool:
    """True if what is launched on the current stream goes into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _to_device(values: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Copies to the device without waiting for it."""
    made = torch.tensor(values, dtype=dtype)
    return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made
