"""The sum of squares of many tensors in one launch, for the norm of gradients.

Transformer Engine's multi-tensor function takes a launch for each 320 chunks of 64k elements; here
one kernel reads all tensors, by addresses that lie in device memory. Each program writes the sum of
its chunk, and these are added up afterwards, in an order that does not change: no atomic additions,
so that the same gradients have the same norm.

Squares are added in float32, in as many lanes as a program has (`triton_norm.BLOCK`), chunks in
float64. All addends are positive: the sum of a chunk is within some 30 roundings of float32
(`CHUNK / BLOCK` in a lane, then those of the lanes), 2e-6 of it at worst and some 1e-8 in a sum of
many chunks. What is infinite or not a number stays so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from .checked_kernels import CheckedKernels
from .tensor_table import DTYPES, Table, Tables

CHUNK = 32768
"""Elements of a tensor whose squares one program of the kernel adds up."""

Tensors = Sequence[torch.Tensor]
Kernel = Callable[[Table, Tensors], torch.Tensor]
"""Sums of squares, float32 (chunks)."""


class OnePassSquares:
    """Adds up squares.

    Args:
        kernel: what does so on a device; None where nothing can.

    tables: where the tensors of its calls are.
    """

    def __init__(self, kernel: Callable[[torch.device], Kernel | None]) -> None:
        self._kernel, self.tables = kernel, Tables(CHUNK)

    def __call__(self, tensors: Tensors) -> torch.Tensor | None:
        """The sum over `tensors`, float32 (1,) on their device. None where that is left to others:
        see `takes`; without a kernel."""
        if not takes(tensors):
            return None
        kernel = self._kernel(tensors[0].device)
        if kernel is None:
            return None
        sums = kernel(self.tables.of([tensors]), tensors)
        return sums.sum(dim=0, keepdim=True, dtype=torch.float64).float()


def takes(tensors: Tensors) -> bool:
    """Whether the kernel knows how to read these: some, all on one device and of one of `DTYPES`,
    each one stretch of memory."""
    kinds = {(tensor.device, tensor.dtype) for tensor in tensors}
    return (
        len(kinds) == 1
        and tensors[0].dtype in DTYPES
        and all(tensor.is_contiguous() for tensor in tensors)
    )


def _check(kernel: Kernel, device: torch.device) -> None:
    """Against torch: a compiler that breaks the kernel would change all steps and say nothing.

    Raises:
        ArithmeticError: the sums differ by more than roundings.
    """
    made = torch.linspace(-1, 1, 2 * CHUNK + 5, device=device)
    for tensors in ([made[1:], made[:1], made[: CHUNK + 3]], [made[:CHUNK], made[: CHUNK // 2]]):
        found = kernel(Tables(CHUNK).of([tensors]), tensors).double().sum()
        expected = sum(tensor.double().square().sum() for tensor in tensors)
        if not torch.allclose(found, torch.as_tensor(expected), rtol=1e-5):
            raise ArithmeticError(f"a sum of squares is {found.item()} for {expected}")


def _load() -> Kernel:
    from .triton_norm import sums_of_squares as kernel

    return kernel


kernel_of = CheckedKernels(
    _load, _check, "the gradient norm is left to megatron-core, whose kernels take a third longer"
)
