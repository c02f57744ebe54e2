"""Kernels that are compared with torch on a device before anything trains with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import torch

from ..core.runtime.kernels import kernel_or_warning

Kernel = TypeVar("Kernel")


class CheckedKernels(Generic[Kernel]):
    """A kernel for each GPU, that is checked there before it is first used.

    Args:
        load: imports it, where Triton is.
        check: raises where it does something else on a device than it should.
        otherwise: what is done without, for a warning.
    """

    def __init__(
        self, load: Callable[[], Kernel], check: Callable[[Kernel, torch.device], None],
        otherwise: str,
    ) -> None:  # fmt: skip
        self._load, self._check, self._otherwise = load, check, otherwise
        self._found: dict[torch.device, Kernel | None] = {}

    def __call__(self, device: torch.device) -> Kernel | None:
        """None where there is none, which is said once."""
        if device.type != "cuda":
            return None
        if device not in self._found:
            self._found[device] = self.tried(device)
        return self._found[device]

    def tried(self, device: torch.device) -> Kernel | None:
        """Loads and checks it, on a device of any type."""

        def checked() -> Kernel:
            kernel = self._load()
            self._check(kernel, device)
            return kernel

        return kernel_or_warning(checked, self._otherwise)
