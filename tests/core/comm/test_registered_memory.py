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

from megatron_fsdp_adapter.core.comm.registered import RegisteredMemory

CHECKS = ("core/comm/registered.py",)

CPU = torch.device("cpu")


def pools_of(group: Any, call: str) -> list[Any]:
    """Those that its backend was called with."""
    return [pool for (pool,), _ in getattr(group._get_backend(), call).call_args_list]


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Two, whose backends are asked as `ProcessGroupNCCL` of torch 2.13, and note what for."""
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group: None)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "MemPool", lambda allocator: SimpleNamespace())
    monkeypatch.setattr(torch.cuda, "use_mem_pool", lambda pool, device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    calls = ["mem_allocator", "register_mem_pool", "deregister_mem_pool"]
    backends = [mock.Mock(spec_set=calls) for _ in range(2)]
    return [mock.Mock(**{"_get_backend.return_value": backend}) for backend in backends]


@pytest.mark.parametrize("at_once", [True, False])
def test_memory_is_registered_once_and_forgotten_with_it(groups, at_once):
    """Weights, then buckets: two pools, each with both communicators, when they are made or, if
    that was put off, when it is asked for."""
    memory = RegisteredMemory(groups, CPU, at_once=at_once)
    for sizes in ([8, 16], [8]):
        memory.allocate(sizes)
        assert at_once == any(pools_of(group, "register_mem_pool") for group in groups)
    for _ in range(2):
        memory.register()
    pools, others = (pools_of(group, "register_mem_pool") for group in groups)
    assert pools == others
    assert len(pools) == 2
    assert pools[0] is not pools[1]
    del memory
    gc.collect()
    assert all(pools_of(group, "deregister_mem_pool") == pools for group in groups)
