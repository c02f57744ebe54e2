"""One gloo device for all process groups of a process.

torch gives each group of gloo a device of its own, and each device a thread that wakes up 100 times
a second. Ranks that train many small cases make hundreds of groups: 500 of them in each of 4
processes left nothing of two cores.
"""

from __future__ import annotations

import functools
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d


def share() -> None:
    """Lets the gloo groups that this process makes from now on use one device. For processes that
    are ours from start to end."""
    base: Any = dist.ProcessGroupGloo
    device = functools.cache(base.create_default_device)  # none where no group is of gloo

    class OnSharedDevice(base):  # type: ignore[misc]
        def __init__(
            self, store: Any, rank: int, size: int,
            timeout: timedelta = distributed_c10d.default_pg_timeout, **more: Any,
        ) -> None:  # fmt: skip
            if any(more.values()):
                super().__init__(store, rank, size, timeout=timeout, **more)
                return
            options = base._Options()
            options._devices, options._timeout = [device()], timeout
            super().__init__(store, rank, size, options)

    distributed_c10d.ProcessGroupGloo = OnSharedDevice  # type: ignore[misc]
