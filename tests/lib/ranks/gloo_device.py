"""One gloo device for all process groups of a process.

torch creates one device per gloo group, and each device has a thread that wakes up 100 times a
second. Ranks that train many small cases create hundreds of groups, whose threads would use up the
cores.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d


def with_one_device(fn: Callable[..., Any], rank: int, world: int, *args: Any) -> Any:
    """What a rank's function returns, with one device for all groups that it makes."""
    share()
    return fn(rank, world, *args)


def share() -> None:
    """Makes all later gloo groups of this process use one device."""
    base: Any = dist.ProcessGroupGloo
    device = functools.cache(base.create_default_device)  # not created without gloo groups

    class OnSharedDevice(base):  # type: ignore[misc]
        def __init__(
            self,
            store: Any,
            rank: int,
            size: int,
            timeout: timedelta = distributed_c10d.default_pg_timeout,
            **more: Any,
        ) -> None:
            if any(more.values()):
                super().__init__(store, rank, size, timeout=timeout, **more)
                return
            options = base._Options()
            options._devices = [device()]
            options._timeout = timeout
            super().__init__(store, rank, size, options)

    distributed_c10d.ProcessGroupGloo = OnSharedDevice  # type: ignore[misc]
