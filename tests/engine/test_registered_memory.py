"""When memory is registered with a communicator, without NCCL: pools and backends stand in."""

from __future__ import annotations

import contextlib
import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_fsdp_adapter.comm.registered import RegisteredMemory

CPU = torch.device("cpu")


class Backend:
    """Of one group, as `ProcessGroupNCCL` of torch 2.13: what was registered with it."""

    mem_allocator = None

    def __init__(self) -> None:
        self.registered: list[Any] = []
        self.forgotten: list[Any] = []

    def register_mem_pool(self, pool: Any, symm: bool) -> None:
        self.registered.append(pool)

    def deregister_mem_pool(self, pool: Any) -> None:
        self.forgotten.append(pool)


class Group:
    def __init__(self) -> None:
        self.backend = Backend()

    def _get_backend(self, device: torch.device) -> Backend:
        return self.backend


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group: None)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "MemPool", lambda allocator: SimpleNamespace())
    monkeypatch.setattr(
        torch.cuda, "use_mem_pool", lambda pool, device: contextlib.nullcontext()
    )
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    return [Group(), Group()]


def test_memory_is_registered_once_when_it_is_made(groups):
    """Weights, then buckets: two pools, each with both communicators, without anybody's asking."""
    memory = RegisteredMemory(groups, CPU)
    memory.allocate([8, 16])
    assert [len(group.backend.registered) for group in groups] == [1, 1]
    memory.allocate([8])
    memory.register()
    pools = [group.backend.registered for group in groups]
    assert pools[0] == pools[1] and len(pools[0]) == 2 and pools[0][0] is not pools[0][1]


def test_registration_that_was_put_off_is_made_once_when_asked_for(groups):
    memory = RegisteredMemory(groups, CPU, at_once=False)
    for _ in range(2):
        memory.allocate([8])
    assert not any(group.backend.registered for group in groups)
    for _ in range(2):
        memory.register()
        assert [len(group.backend.registered) for group in groups] == [2, 2]


def test_what_was_registered_is_forgotten_with_the_memory(groups):
    """Once, and while the communicators are there."""
    memory = RegisteredMemory(groups, CPU)
    memory.allocate([8])
    del memory
    gc.collect()
    for group in groups:
        assert group.backend.forgotten == group.backend.registered
