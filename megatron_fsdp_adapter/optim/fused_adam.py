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
from collections.abc import Callable
from typing import Any

import torch

from ..core.kernels import kernel_or_warning
from .multi_tensor import (
    CHUNK,
    DTYPES,
    MOST_TABLES,
    WEIGHTS,
    Addresses,
    Lists,
    TensorTable,
    Update,
    UpdateKernel,
    chunks_on,
    places_of,
    table_of,
)

DECOUPLED = 1
"""The mode of AdamW; 0 adds weight decay to gradients."""
FUNCTION = "multi_tensor_adam"
"""The attribute of FusedAdam that updates weights without a copy in its state."""


class FusedAdamStep:
    """Stands in the place of FusedAdam's multi-tensor function.

    Args:
        original: that function.
        kernel: what updates on a device; None where nothing can.
    """

    def __init__(
        self, original: Callable[..., Any], kernel: Callable[[torch.device], UpdateKernel | None]
    ) -> None:
        self._original = original
        self._kernel = kernel
        # By stream, addresses of weights, and sizes: the table, with all addresses that it has.
        self.known: dict[Any, tuple[Addresses, TensorTable]] = {}
        self._chunks = functools.lru_cache(MOST_TABLES)(chunks_on)
        # One float32 on the device that the next calls multiply gradients by; None if none is.
        self.clip: torch.Tensor | None = None

    def __call__(
        self,
        chunk_size: int,
        overflow: torch.Tensor,
        lists: Lists,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        step: int,
        mode: int,
        bias_correction: int,
        weight_decay: float,
    ) -> None:
        kernel = self._kernel(lists[0][0].device) if takes(lists) else None
        if kernel is None:
            if self.clip is not None:
                torch._foreach_mul_(list(lists[0]), self.clip.view(()))
            adam = (lr, beta1, beta2, eps, step, mode, bias_correction, weight_decay)
            self._original(chunk_size, overflow, lists, *adam)
            return
        update = Update(
            lr=lr,
            beta1=beta1,
            beta2=beta2,
            eps=eps,
            correction1=_correction(beta1 if bias_correction else 0.0, step),
            correction2=_correction(beta2 if bias_correction else 0.0, step),
            decoupled=mode == DECOUPLED,
            weight_decay=weight_decay,
            clip=self.clip,
        )
        kernel(self._table_of(lists), lists, update)
        if self.clip is not None and self.clip.is_cuda:
            self.clip.record_stream(torch.cuda.current_stream())  # freed before the kernel ran

    def _table_of(self, lists: Lists) -> TensorTable:
        """The table of these tensors. Each set of weights has one, which is made again when another
        address has changed."""
        addresses, sizes, device, stream = places_of(lists)
        key = stream, addresses[WEIGHTS], sizes
        known = self.known.get(key)
        if known is not None and known[0] == addresses:
            return known[1]
        table = table_of(self._chunks, addresses, sizes, device, stream)
        if len(self.known) >= MOST_TABLES:
            self.known.clear()
        self.known[key] = addresses, table
        return table


def install(optimizer: Any) -> FusedAdamStep | None:
    """Puts the kernel into a FusedAdam, and returns what stands there now; None for any other
    optimizer. The kernel is tried in the first step."""
    original = getattr(optimizer, FUNCTION, None)
    if original is None:
        return None
    made = FusedAdamStep(original, kernel_of)
    setattr(optimizer, FUNCTION, made)
    return made


def _check(kernel: UpdateKernel, device: torch.device) -> None:
    """Compares a step of the kernel with torch in float64: a compiler that breaks the kernel would
    break training silently.

    Raises:
        ArithmeticError: a weight or a moment differs by more than roundings.
    """
    given = Update(
        lr=0.1,
        beta1=0.9,
        beta2=0.95,
        eps=1e-3,
        correction1=0.5,
        correction2=0.25,
        decoupled=True,
        weight_decay=0.1,
        clip=torch.full((), 0.5, dtype=torch.float32, device=device),
    )
    for skip in (0, 1):  # aligned addresses, and others
        size = CHUNK + 8 + skip
        lists = [
            [torch.linspace(low, 1, size, dtype=torch.float32, device=device)[skip:]]
            for low in (-1, -1, -1, 0)
        ]
        grad, weight, first, second = (tensors[0].double() for tensors in lists)
        grad = 0.5 * grad
        first = 0.9 * first + 0.1 * grad
        second = 0.95 * second + 0.05 * grad * grad
        update = first / 0.5 / ((second / 0.25).sqrt() + 1e-3) + 0.1 * weight
        weight = weight - 0.1 * update
        kernel(table_of(chunks_on, *places_of(lists)), lists, given)
        _, (weights,), (firsts,), (seconds,) = lists
        _check_close("weights", weights, weight)
        _check_close("moments", firsts, first)
        _check_close("second moments", seconds, second)


def _check_close(name: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    if not torch.allclose(found.double(), expected, rtol=1e-4, atol=1e-5):
        error = (found - expected).abs().max().item()
        raise ArithmeticError(f"updated {name} are off by {error}")


def tried(device: torch.device) -> UpdateKernel | None:
    """The kernel, after a check on the device, of any type; None, with a warning, if it fails."""

    def checked() -> UpdateKernel:
        from .triton_adam import update as kernel

        _check(kernel, device)
        return kernel

    return kernel_or_warning(
        checked, "Adam is left to the optimizer's own kernels, which take a quarter longer"
    )


_tried_once = functools.cache(tried)


def kernel_of(device: torch.device) -> UpdateKernel | None:
    """The kernel on a GPU, which is tried when it is first asked for; None elsewhere."""
    return _tried_once(device) if device.type == "cuda" else None


def _correction(beta: float, step: int) -> float:
    """1 - beta**step, of float32 `beta`, as Transformer Engine computes it: in float64, rounded
    once."""
    return 1 - torch.tensor(beta, dtype=torch.float32, device="cpu").item() ** step


def takes(lists: Lists) -> bool:
    """True if the kernel can update these:

    - There are four lists. A fifth one would be a copy of the weights in another dtype.
    - Each list has one dtype, float32 or bf16. Both moments have the same.
    - All tensors are contiguous.
    """
    if len(lists) != 4:
        return False
    dtypes = [{tensor.dtype for tensor in tensors} for tensors in lists]
    for found in dtypes:
        if len(found) != 1 or not found <= set(DTYPES):
            return False
    if dtypes[2] != dtypes[3]:
        return False
    return all(tensor.is_contiguous() for tensors in lists for tensor in tensors)
