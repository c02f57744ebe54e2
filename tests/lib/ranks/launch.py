"""Runs a function on several processes, whose gloo groups share a device, and brings back what each
returned."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tests.lib.ranks import ranks
from tests.lib.ranks.gloo_device import with_one_device
from tests.lib.ranks.one_rank import as_one_of_many_in

PRELOADED = ranks.PRELOADED


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 120.0,
    backend: str = "gloo",
    whole: bool = False,
) -> list[Any]:
    """As `ranks.run_ranks`. One rank stands for one of many, unless it is to be a `whole` world."""
    if world_size == 1 and not whole:
        fn = functools.partial(as_one_of_many_in, fn)
    fn = functools.partial(with_one_device, fn)
    return ranks.run_ranks(fn, world_size, *args, timeout=timeout, backend=backend)


def settle_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 120.0,
    backend: str = "gloo",
    grace: float = ranks.GRACE_S,
) -> list[tuple[bool, Any]]:
    """As `ranks.settle_ranks`."""
    fn = functools.partial(with_one_device, fn)
    return ranks.settle_ranks(fn, world_size, *args, timeout=timeout, backend=backend, grace=grace)
