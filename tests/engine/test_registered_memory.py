"""When memory is registered with a communicator, without NCCL: pools and backends stand in."""

from __future__ import annotations

import contextlib
import gc
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_fsdp_adapter.comm.registered import RegisteredMemory

CPU = torch.device("cpu")


def group() -> Any:
    """One whose backend is asked as `ProcessGroupNCCL` of torch 2.13, and notes what for."""
    calls = ["mem_allocator", "register_mem_pool", "deregister_mem_pool"]
    return mock.Mock(**{"_get_backend.return_value": mock.Mock(spec_set=calls)})


def pools_of(group: Any, call: str = "register_mem_pool") -> list[Any]:
    """Those that its backend was called with."""
    calls = getattr(group._get_backend(), call).call_args_list
    return [pool for (pool,), _ in calls]


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group: None)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "MemPool", lambda allocator: SimpleNamespace())
    monkeypatch.setattr(
        torch.cuda, "use_mem_pool", lambda pool, device: contextlib.nullcontext()
    )
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    return [group(), group()]


def test_memory_is_registered_once_when_it_is_made(groups):
    """Weights, then buckets: two pools, each with both communicators, without anybody's asking."""
    memory = RegisteredMemory(groups, CPU)
    memory.allocate([8, 16])
    assert [len(pools_of(group)) for group in groups] == [1, 1]
    memory.allocate([8])
    memory.register()
    pools = [pools_of(group) for group in groups]
    assert pools[0] == pools[1] and len(pools[0]) == 2 and pools[0][0] is not pools[0][1]


def test_registration_that_was_put_off_is_made_once_when_asked_for(groups):
    memory = RegisteredMemory(groups, CPU, at_once=False)
    for _ in range(2):
        memory.allocate([8])
    assert not any(pools_of(group) for group in groups)
    for _ in range(2):
        memory.register()
        assert [len(pools_of(group)) for group in groups] == [2, 2]


def test_what_was_registered_is_forgotten_with_the_memory(groups):
    """Once, and while the communicators are there."""
    memory = RegisteredMemory(groups, CPU)
    memory.allocate([8])
    del memory
    gc.collect()
    for group in groups:
        assert pools_of(group, "deregister_mem_pool") == pools_of(group) != []
