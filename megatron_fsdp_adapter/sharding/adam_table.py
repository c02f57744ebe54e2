"""What a kernel of Adam for many tensors is told: numbers, and where the tensors are."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

CHUNK = 8192
"""Elements of a tensor that one program of the kernel updates."""
ALIGNED_BYTES = 16
"""Of an address from which a thread can read 4 numbers at once."""
DTYPES = (torch.float32, torch.bfloat16)

Lists = Sequence[Sequence[torch.Tensor]]
"""Gradients, weights, first and second moments, of the same tensors in turn."""
Number = float | torch.Tensor
"""As it is, or as one float32 on the device."""


@dataclass(frozen=True)
class Update:
    """What an update of Adam reads beside tensors, as float32. clip: one number on the device that
    gradients are multiplied by first; None for 1. decoupled: weight decay is AdamW's.

    scale, overflow: one float32 and one int32 on the device, where a CUDA graph may have the
    update: gradients are multiplied by `scale` then, and written back if it is not 1; with an
    `overflow` of 1 nothing is updated. lr and both corrections are on the device, too. Otherwise
    they are numbers, and these None.

    Raises:
        ValueError: some of these are on the device, and others are not.
    """

    lr: Number
    beta1: float
    beta2: float
    eps: float
    correction1: Number
    correction2: Number
    decoupled: bool
    weight_decay: float
    clip: torch.Tensor | None = None
    scale: torch.Tensor | None = None
    overflow: torch.Tensor | None = None

    def __post_init__(self) -> None:
        told = (self.lr, self.correction1, self.correction2, self.scale, self.overflow)
        if len({isinstance(value, torch.Tensor) for value in told}) != 1:
            raise ValueError(
                f"lr, correction1, correction2, scale and overflow are {told}; give tensors for "
                "all of them, or numbers, and None for the last two"
            )

    @property
    def on_device(self) -> bool:
        """Whether the kernel reads from memory what may change between replays."""
        return self.scale is not None


@dataclass(frozen=True)
class Table:
    """Where tensors are, on their device. addresses: int64 (5, n): of gradients, weights, first and
    second moments, and the numbers of elements; tensor_of: int32 (chunks): the tensor of each
    chunk; first_of: int32 (n): the first chunk of each tensor. aligned: whether all addresses and
    numbers of elements are multiples of what a thread reads at once."""

    addresses: torch.Tensor
    tensor_of: torch.Tensor
    first_of: torch.Tensor
    aligned: bool

    @property
    def chunks(self) -> int:
        return self.tensor_of.numel()


Kernel = Callable[[Table, Lists, Update], None]
"""Updates weights and moments in place."""


def chunks_of(sizes: Sequence[int], chunk: int = CHUNK) -> tuple[list[int], list[int]]:
    """The tensor of each chunk, and the first chunk of each tensor."""
    counts = [-(-size // chunk) for size in sizes]
    tensor_of = [number for number, count in enumerate(counts) for _ in range(count)]
    return tensor_of, list(itertools.accumulate(counts, initial=0))[:-1]


def is_aligned(addresses: Sequence[Sequence[int]], sizes: Sequence[int]) -> bool:
    """Whether threads can read 16 bytes at a time, of numbers of 4 bytes or 2."""
    whole = all(size % (ALIGNED_BYTES // DTYPES[1].itemsize) == 0 for size in sizes)
    return whole and not any(a % ALIGNED_BYTES for some in addresses for a in some)
