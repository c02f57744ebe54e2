"""The host runtime's queues, and what each backend can do."""

from __future__ import annotations

import contextlib
import warnings
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_fsdp_adapter.core.comm import communicator as comm
from megatron_fsdp_adapter.core.comm.communicator import (
    STREAM_ORDERED,
    Communicator,
    is_stream_ordered,
)
from megatron_fsdp_adapter.core.runtime.device import (
    COMPUTE,
    GATHER,
    REDUCE,
    HostRuntime,
)
from megatron_fsdp_adapter.core.runtime.rank_warnings import warn
from tests.lib.engine.pretended import pretended_world

CHECKS = (
    "core/runtime/device.py",
    "core/runtime/rank_warnings.py",
    "core/runtime/launcher.py",
    "core/comm/communicator.py",
)


class Diary:
    """Tasks and works write down when they start and when they are waited for."""

    def __init__(self) -> None:
        self.runtime, self.lines = HostRuntime(), list[str]()
        self.synchronize, self.abandon = self.runtime.synchronize, self.runtime.abandon
        self.events: dict[str, Any] = {}

    def submit(self, role: str, name: str, works: int = 0) -> None:
        def task() -> list[Any]:
            self.lines.append(f"start {name}")
            names = [f"{name}{i}" if works > 1 else name for i in range(works)]
            return [SimpleNamespace(wait=partial(self.lines.append, f"wait {n}")) for n in names]

        self.runtime.submit(role, task)

    def record(self, role: str, name: str = "last") -> None:
        self.events[name] = self.runtime.record(role)

    def wait(self, role: str, event: str = "last") -> None:
        self.runtime.wait(role, self.events[event])


QUEUES: dict[str, tuple[list[tuple[str, ...] | tuple[Any, ...]], str]] = {
    "work starts at once and is not waited for": ([("submit", GATHER, "a", 1)], "start a"),
    "what comes behind running work is deferred": (
        [("submit", GATHER, "a", 2), ("submit", GATHER, "b"), ("submit", GATHER, "c", 1)],
        "start a",
    ),
    "what is deferred comes in order": (
        [("submit", GATHER, "a", 2), ("submit", GATHER, "b"), ("submit", GATHER, "c", 1),
         ("record", GATHER), ("wait", COMPUTE)],
        "start a, wait a0, wait a1, start b, start c, wait c",
    ),
    "tasks without work run inline": (
        [("submit", GATHER, "a"), ("submit", GATHER, "b")], "start a, start b",
    ),
    "an event is waited for and not more": (
        [("submit", GATHER, "a", 1), ("record", GATHER), ("submit", GATHER, "b", 1),
         ("wait", COMPUTE), ("wait", COMPUTE)],
        "start a, wait a",
    ),
    "a later event is waited for as well": (
        [("submit", GATHER, "a", 1), ("record", GATHER, "first"), ("submit", GATHER, "b", 1),
         ("record", GATHER), ("wait", COMPUTE, "first"), ("wait", COMPUTE)],
        "start a, wait a, start b, wait b",
    ),
    "an event of an idle role has happened": (
        [("record", REDUCE), ("wait", COMPUTE), ("submit", REDUCE, "a"), ("record", REDUCE),
         ("submit", REDUCE, "b", 1), ("wait", COMPUTE)],
        "start a, start b",
    ),
    "roles do not wait for each other unasked": (
        [("submit", GATHER, "g", 1), ("submit", REDUCE, "r", 1), ("record", REDUCE),
         ("wait", COMPUTE)],
        "start g, start r, wait r",
    ),
    "a background role waits for another": (
        [("submit", GATHER, "g", 1), ("record", GATHER), ("wait", REDUCE),
         ("submit", REDUCE, "r")],
        "start g, wait g, start r",
    ),
    "a role is in its own order already": (
        [("submit", GATHER, "a", 1), ("record", GATHER), ("wait", GATHER)], "start a",
    ),
    "waiting for compute is free": (
        [("submit", GATHER, "a", 1), ("record", COMPUTE), ("wait", GATHER)], "start a",
    ),
    "synchronize empties every queue": (
        [("submit", GATHER, "a", 1), ("submit", GATHER, "b", 1), ("submit", REDUCE, "c", 1),
         ("synchronize",), ("submit", GATHER, "d")],
        "start a, start c, wait a, start b, wait b, wait c, start d",
    ),
    "abandoned tasks never start and the queue goes on": (
        [("submit", GATHER, "a", 1), ("submit", GATHER, "b"), ("record", GATHER), ("abandon",),
         ("wait", COMPUTE), ("submit", GATHER, "c")],
        "start a, start c",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", QUEUES)
def test_queues(name):
    steps, expected = QUEUES[name]
    diary = Diary()
    for method, *arguments in steps:
        getattr(diary, method)(*arguments)
    assert ", ".join(diary.lines) == expected


def test_a_task_that_raises_is_raised_where_it_is_waited_for():
    diary = Diary()
    diary.submit(GATHER, "a", 1)
    diary.runtime.submit(GATHER, lambda: 1 / 0)
    diary.record(GATHER)
    with pytest.raises(ZeroDivisionError):
        diary.wait(COMPUTE)


def test_a_wait_that_is_interrupted_starts_nothing_twice():
    diary = Diary()
    late = mock.Mock(side_effect=[KeyboardInterrupt, None])
    task = mock.Mock(return_value=[SimpleNamespace(wait=late)])
    diary.runtime.submit(GATHER, task)
    diary.submit(GATHER, "b")
    diary.record(GATHER)
    with pytest.raises(KeyboardInterrupt):
        diary.wait(COMPUTE)
    assert diary.lines == []
    diary.wait(COMPUTE)
    assert (diary.lines, task.call_count, late.call_count) == (["start b"], 1, 2)


# Backends.


@pytest.mark.parametrize(
    ("backend", "device", "expected"),
    [
        ("cpu:gloo", "cpu", "gloo"),
        ("cuda:nccl", "cuda", "nccl"),
        ("cpu:gloo,cuda:nccl", "cpu", "gloo"),
        ("cpu:gloo,cuda:nccl", "cuda", "nccl"),
        ("cuda:nccl,cpu:gloo", "cpu", "gloo"),
        ("cpu:fake", "cpu", None),
        ("cpu:gloo", "cuda", None),
        ("cpu:mpi,cuda:nccl", "cpu", None),
    ],
)
def test_the_device_s_backend_tells_whether_streams_order_collectives(
    monkeypatch, backend, device, expected
):
    """Others are refused."""
    monkeypatch.setattr(comm.dist, "get_backend_config", lambda group: backend)
    refused = pytest.raises(ValueError, match=rf"'{backend}' has no known .* '{device}'. Use")
    with contextlib.nullcontext() if expected else refused:
        found = is_stream_ordered(None, torch.device(device))  # type: ignore[arg-type]
        assert found is STREAM_ORDERED[expected]


def test_a_group_of_one_launches_nothing(monkeypatch):
    monkeypatch.setattr(comm, "is_stream_ordered", lambda group, device: False)
    with pretended_world(1):
        one = Communicator(dist.group.WORLD, torch.device("cpu"))
    source = torch.arange(3.0)
    target = torch.zeros(2, 3)
    for collective, output in zip((one.all_gather, one.reduce_scatter), target, strict=True):
        assert collective([(output, source)]) == []
    assert one.all_reduce([source]) == [] and one.all_gather([(source, source)]) == []
    one.broadcast(source)
    assert torch.equal(target, source.expand(2, 3))


COALESCED = ["coalesced", "coalesced().__enter__", *["_all_gather"] * 2, "coalesced().__exit__"]


@pytest.mark.parametrize(
    ("backend", "method", "launched", "returned"),
    [
        ("gloo", "all_gather", ["_all_gather"] * 2, 2),
        ("gloo", "reduce_scatter", ["_reduce_scatter"] * 2, 2),
        ("gloo", "all_reduce", ["all_reduce"] * 2, 2),
        ("nccl", "all_gather", COALESCED, 0),
    ],
)
def test_gloo_gives_works_and_nccl_coalesces_in_the_order_of_the_stream(
    monkeypatch, backend, method, launched, returned
):
    told = mock.MagicMock()
    monkeypatch.setattr(comm, "is_stream_ordered", lambda *_: STREAM_ORDERED[backend])
    for owner, name in ((comm, "_all_gather"), (comm, "_reduce_scatter"), (dist, "all_reduce")):
        monkeypatch.setattr(owner, name, getattr(told, name))
    monkeypatch.setattr(comm, "_coalescing_manager", told.coalesced)
    with pretended_world(2):
        two = Communicator(dist.group.WORLD, torch.device("cpu"))
        if method == "all_reduce":
            one = torch.zeros(4)
        else:
            one = (torch.zeros(4), torch.zeros(4))
        assert len(getattr(two, method)([one, one])) == returned
        assert [name for name, _, _ in told.mock_calls] == launched
        getattr(two, method)([one])
    assert told.mock_calls[-1][0] == launched[-2], "alone it is not coalesced"
    asked = {given["async_op"] for _, _, given in told.mock_calls if "async_op" in given}
    assert asked == {backend == "gloo"}


@pytest.mark.parametrize("is_known", (False, True))
@pytest.mark.parametrize(
    ("rank", "local", "of_host", "expected"),
    [(0, 0, False, 1), (1, 1, False, 0), (8, 0, False, 0), (8, 0, True, 1), (9, 1, True, 0)],
)
def test_a_warning_is_said_by_one_rank(is_known, rank, local, of_host, expected, monkeypatch):
    """With a process group, and before there is one."""
    monkeypatch.setenv("RANK", str(0 if is_known else rank))
    monkeypatch.setenv("LOCAL_RANK", str(local))
    if is_known:
        world = pretended_world(16, rank)
    else:
        world = contextlib.nullcontext()
    with world, warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        warn("slower", of_host=of_host)
    assert len(found) == expected
