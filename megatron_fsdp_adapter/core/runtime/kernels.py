"""Kernels in Triton, where it can be used."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TypeVar

Kernel = TypeVar("Kernel")

SQUARED = 2048
"""Elements of a sum over ranks whose squares are added up to one number."""


def kernel_or_warning(tried: Callable[[], Kernel], otherwise: str) -> Kernel | None:
    """What `tried` returns, which runs it once: Triton needs a C compiler where it runs first. None
    where it cannot be used, and a warning that says what is done `otherwise`."""
    try:
        return tried()
    except Exception as error:  # whatever a missing or broken compiler raises
        warnings.warn(f"{otherwise}: Triton cannot be used here ({error!r})", stacklevel=3)
        return None
