"""A world of one that stands for a rank of many: most tests of the adapter have one process, and
want what is sharded to come and go. What it really does: tests/plan/test_units.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist

from megatron_fsdp_adapter.build import building


@contextmanager
def world_of_one() -> Iterator[None]:
    """A gloo world of this process alone, without a launcher."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def as_one_of_many() -> Iterator[None]:
    """Inside, domains of one rank are sharded too."""
    with mock.patch.object(building, "has_one_rank", lambda domain: False):
        yield


def as_one_of_many_in(fn: Callable[..., Any], rank: int, world: int, *args: Any) -> Any:
    """`fn(rank, world, *args)` so, in a process of its own."""
    with as_one_of_many():
        return fn(rank, world, *args)
