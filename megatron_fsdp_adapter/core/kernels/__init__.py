"""Kernels in Triton, where it can be used."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ..runtime.rank_warnings import warn

Kernel = TypeVar("Kernel")


def kernel_or_warning(tried: Callable[[], Kernel], otherwise: str) -> Kernel | None:
    """The result of `tried`, which runs it once: Triton needs a C compiler where it runs first.
    None where it cannot be used, and a warning on each host with what is done `otherwise`."""
    try:
        return tried()
    except Exception as error:  # whatever a missing or broken compiler raises
        warn(f"{otherwise}: Triton cannot be used here ({error!r})", of_host=True)
        return None
