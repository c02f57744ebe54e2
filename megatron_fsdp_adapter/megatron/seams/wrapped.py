"""Functions of other packages that ours are called in place of, until they are given back."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

_HELD = "_fsdp_held"
"""An attribute of what stands there: what its owner had by itself, None if it was inherited."""


def is_wrapped(function: Any) -> bool:
    """Whether `wrap` put it there."""
    return hasattr(function, _HELD)


def wrap(owner: Any, name: str, ours: Callable[..., Any]) -> None:
    """Puts a function in the place of `owner`'s that calls `ours` with the original before the
    call's own arguments. Idempotent. owner: a class or a module."""
    original = getattr(owner, name)
    if is_wrapped(original):
        return

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        return ours(original, *args, **kwargs)

    held = vars(owner).get(name)
    setattr(function, _HELD, held)
    setattr(owner, name, staticmethod(function) if isinstance(held, staticmethod) else function)


def unwrap(owner: Any, name: str) -> None:
    """Gives `owner` back what it had. Harmless where nothing is wrapped."""
    function = getattr(owner, name, None)
    if not is_wrapped(function):
        return
    held = getattr(function, _HELD)
    if held is None:
        delattr(owner, name)
    else:
        setattr(owner, name, held)
