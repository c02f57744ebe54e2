"""Tables of addresses, for a kernel that takes many tensors in one launch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

ALIGNED_BYTES = 16
"""Of an address from which a thread can read 4 numbers at once."""
DTYPES = (torch.float32, torch.bfloat16)
WEIGHTS = 1
"""Their place among the lists. They stay where they are: others have tables of their own."""
MOST_TABLES = 4096
"""That are kept: of more calls than a step has, for memory that moves again and again."""

Lists = Sequence[Sequence[torch.Tensor]]
"""Lists of tensors; those at one place in them have as many elements."""
Addresses = tuple[tuple[int, ...], ...]
"""Of tensors, by list."""
Chunks = tuple[torch.Tensor, torch.Tensor]
"""`Table.tensor_of` and `Table.first_of`, which follow from sizes."""


@dataclass(frozen=True)
class Table:
    """Where tensors are, on their device. addresses: int64 (lists + 1, n): of the tensors of each
    list, and the numbers of elements; tensor_of: int32 (chunks): the tensor of each chunk;
    first_of: int32 (n): the first chunk of each tensor. chunk: elements of one. aligned: whether
    all addresses and numbers of elements are multiples of what a thread reads at once."""

    addresses: torch.Tensor
    tensor_of: torch.Tensor
    first_of: torch.Tensor
    chunk: int
    aligned: bool

    @property
    def chunks(self) -> int:
        return self.tensor_of.numel()


class Tables:
    """Makes tables, and keeps them for further calls with the same tensors.

    Args:
        chunk: elements of a tensor that one program of the kernel takes.

    known: the tables, and the addresses that they have.
    """

    def __init__(self, chunk: int) -> None:
        self._chunk = chunk
        self.known: dict[Any, tuple[Addresses, Table]] = {}
        self._chunks: dict[Any, Chunks] = {}

    def of(self, lists: Lists) -> Table:
        """That of `lists`, made again when an address has changed.

        Raises:
            RuntimeError: in a CUDA graph, which would go on reading a table that may be gone.
        """
        device = lists[0][0].device
        if is_capturing(device):
            raise RuntimeError(
                "optimizer.step() in a CUDA graph: its replays would read addresses of tensors "
                "that may have moved since. Take the step outside of the graph."
            )
        addresses, sizes = _places_of(lists)
        stream = torch.cuda.current_stream().cuda_stream if device.type == "cuda" else 0
        place = (stream, addresses[WEIGHTS], sizes)
        before, table = self.known.get(place, (None, None))
        if table is not None and before == addresses:
            return table
        if (stream, sizes) not in self._chunks:
            tensor_of, first_of = (
                _to_device(row, torch.int32, device) for row in chunks_of(sizes, self._chunk)
            )
            self._chunks[stream, sizes] = tensor_of, first_of
        where = _to_device([*addresses, sizes], torch.int64, device)
        chunks = self._chunks[stream, sizes]
        table = Table(where, *chunks, self._chunk, is_aligned(addresses, sizes))
        if len(self.known) >= MOST_TABLES:
            self.known.clear()
        self.known[place] = (addresses, table)
        return table


def chunks_of(sizes: Sequence[int], chunk: int) -> tuple[list[int], list[int]]:
    """The tensor of each chunk, and the first chunk of each tensor."""
    counts = [-(-size // chunk) for size in sizes]
    tensor_of = [number for number, count in enumerate(counts) for _ in range(count)]
    return tensor_of, list(itertools.accumulate(counts, initial=0))[:-1]


def is_aligned(addresses: Sequence[Sequence[int]], sizes: Sequence[int]) -> bool:
    """Whether threads can read 16 bytes at a time, of numbers of 4 bytes or 2."""
    whole = all(size % (ALIGNED_BYTES // DTYPES[1].itemsize) == 0 for size in sizes)
    return whole and not any(a % ALIGNED_BYTES for some in addresses for a in some)


def is_capturing(device: torch.device) -> bool:
    """Whether what is launched on the current stream goes into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _places_of(lists: Lists) -> tuple[Addresses, tuple[int, ...]]:
    """Addresses by list, and elements."""
    addresses = tuple(tuple(tensor.data_ptr() for tensor in tensors) for tensors in lists)
    return addresses, tuple(tensor.numel() for tensor in lists[0])


def _to_device(values: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Without waiting for the device."""
    made = torch.tensor(values, dtype=dtype)
    return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made
