"""Kernels in Triton, where it can be used."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ..runtime.rank_warnings import warn

Kernel = TypeVar("Kernel")


def kernel_or_warning(tried: Callable[[], Kernel], otherwise: str) -> Kernel | None:
    """The kernel that `tried` returns, or None if Triton cannot be used.

    `tried` has to run the kernel once, because Triton needs a C compiler only then. otherwise: what
    is done without the kernel, for the warning on each host."""
    try:
        return tried()
    except Exception as error:  # whatever a missing or broken compiler raises
        warn(f"{otherwise}: Triton cannot be used here ({error!r})", of_host=True)
        return None
