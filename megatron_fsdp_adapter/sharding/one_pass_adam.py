"""Adam in one pass over gradients, weights and moments, the clip of gradients in it.

Transformer Engine's and apex's FusedAdam hand lists of tensors to a multi-tensor function that is
an attribute of the optimizer. `install` puts a kernel of our own there, with the bits of
Transformer Engine's: one launch for all tensors in place of one for each 320 chunks of 64k
elements, loads of 16 bytes, and gradients multiplied by the clip factor in registers. On an H200 it
moves 4.1 TB/s where Transformer Engine's moves 3.4, and the pass that clips (8 bytes an element) is
not taken.

Everything else, state and its dtypes, the count of steps, what is scaled, stays the optimizer's. An
own optimizer was rejected for that: checkpoints, schedulers and Megatron know FusedAdam. What the
kernel does not take goes to the function that was there, so that results are the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..core.runtime.kernels import kernel_or_warning
from .adam_table import DTYPES, Kernel, Lists, Table, Update, chunks_of, is_aligned

MOST_TABLES = 4096
"""That are kept: of more calls than a step has, for memory that moves again and again."""
DECOUPLED = 1
"""The mode of AdamW; 0 adds weight decay to gradients."""
FUNCTION = "multi_tensor_adam"
"""The attribute of FusedAdam."""

Chunks = tuple[torch.Tensor, torch.Tensor]
"""`Table.tensor_of` and `Table.first_of`, which follow from sizes."""


class OnePassAdam:
    """Stands in the place of FusedAdam's multi-tensor function.

    Args:
        original: that function.
        kernel: what updates on a device; None where nothing can.

    clip: one float32 on the device that gradients are multiplied by in the calls that follow; None
    for nothing.
    """

    def __init__(
        self, original: Callable[..., Any], kernel: Callable[[torch.device], Kernel | None]
    ) -> None:
        self._original, self._kernel = original, kernel
        self._tables: dict[Any, tuple[Any, Table]] = {}
        self._chunks: dict[Any, Chunks] = {}
        self.clip: torch.Tensor | None = None

    def __call__(
        self, chunk_size: int, overflow: torch.Tensor, lists: Lists, lr: float, beta1: float,
        beta2: float, eps: float, step: int, mode: int, bias_correction: int, weight_decay: float,
    ) -> None:  # fmt: skip
        kernel = self._kernel(lists[1][0].device)
        if kernel is None or not takes(lists):
            if self.clip is not None:
                torch._foreach_mul_(list(lists[0]), self.clip)
            self._original(
                chunk_size, overflow, lists, lr, beta1, beta2, eps, step, mode, bias_correction,
                weight_decay,
            )  # fmt: skip
            return
        first, second = (_correction(b, step) if bias_correction else 1.0 for b in (beta1, beta2))
        update = Update(
            lr, beta1, beta2, eps, first, second, mode == DECOUPLED, weight_decay, self.clip
        )
        kernel(self._table(lists), lists, update)
        if self.clip is not None and self.clip.is_cuda:
            self.clip.record_stream(torch.cuda.current_stream())  # it ends with the step

    def _table(self, lists: Lists) -> Table:
        """That of `lists`, made again when an address has changed."""
        device = lists[1][0].device
        addresses, sizes = _places_of(lists)
        stream = torch.cuda.current_stream().cuda_stream if device.type == "cuda" else 0
        place = (stream, addresses[1], sizes)  # other tensors have the same memory in turn
        known = self._tables.get(place)
        if known is not None and known[0] == addresses:
            return known[1]
        if (stream, sizes) not in self._chunks:
            self._chunks[stream, sizes] = _chunks_on(device, sizes)
        table = _table_on(device, addresses, sizes, self._chunks[stream, sizes])
        if len(self._tables) >= MOST_TABLES:
            self._tables.clear()
        self._tables[place] = (addresses, table)
        return table


def install(optimizer: Any) -> OnePassAdam | None:
    """Puts the kernel into a FusedAdam that steps by itself, not in a CUDA graph; None for any
    other optimizer. It is tried when the first step is taken."""
    original = getattr(optimizer, FUNCTION, None)
    if original is None or getattr(optimizer, "capturable", False):
        return None
    made = OnePassAdam(original, kernel_of)
    setattr(optimizer, FUNCTION, made)
    return made


def kernel_of(device: torch.device) -> Kernel | None:
    """None where there is none, which is said once."""
    return _kernel(device) if device.type == "cuda" else None


@functools.cache
def _kernel(device: torch.device) -> Kernel | None:
    def tried() -> Kernel:
        from .triton_adam import update as kernel

        one = [[torch.zeros(1, device=device)] for _ in range(4)]
        addresses, sizes = _places_of(one)
        table = _table_on(device, addresses, sizes, _chunks_on(device, sizes))
        kernel(table, one, Update(0.0, 0.9, 0.9, 1.0, 1.0, 1.0, True, 0.0))
        return kernel

    return kernel_or_warning(
        tried, "Adam is left to the optimizer's own kernels, which take a quarter longer"
    )


def _places_of(lists: Lists) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]:
    """Addresses by list, and elements."""
    addresses = tuple(tuple(tensor.data_ptr() for tensor in tensors) for tensors in lists)
    return addresses, tuple(tensor.numel() for tensor in lists[1])


def _chunks_on(device: torch.device, sizes: Sequence[int]) -> Chunks:
    tensor_of, first_of = (_to_device(row, torch.int32, device) for row in chunks_of(sizes))
    return tensor_of, first_of


def _table_on(
    device: torch.device, addresses: Sequence[Sequence[int]], sizes: Sequence[int], chunks: Chunks
) -> Table:
    places = _to_device([*addresses, sizes], torch.int64, device)
    return Table(places, *chunks, is_aligned(addresses, sizes))


def _to_device(values: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Without waiting for the device."""
    made = torch.tensor(values, dtype=dtype)
    return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made


def _correction(beta: float, step: int) -> float:
    """1 - beta**step, of float32 `beta`, as Transformer Engine computes it."""
    narrow = torch.tensor(beta, dtype=torch.float32).item()
    return 1 - narrow**step


def takes(lists: Lists) -> bool:
    """Whether the kernel knows how to update these: main weights without a copy in another dtype,
    every tensor one stretch of memory, dtypes alike within a list. Not while a CUDA graph is
    captured, which would keep the addresses."""
    on_gpu = lists[1][0].is_cuda
    if len(lists) != 4 or (on_gpu and torch.cuda.is_current_stream_capturing()):
        return False
    dtypes = [{tensor.dtype for tensor in tensors} for tensors in lists]
    return (
        all(len(found) == 1 and found <= set(DTYPES) for found in dtypes)
        and dtypes[2] == dtypes[3]
        and all(tensor.is_contiguous() for tensors in lists for tensor in tensors)
    )
