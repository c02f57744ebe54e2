"""The host runtime's queues, and what each backend can do."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
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
    CudaRuntime,
    HostRuntime,
    host_pages,
    make_runtime,
)
from megatron_fsdp_adapter.core.runtime.rank_warnings import warn
from tests.lib.engine.pretended import pretended_world

CHECKS = (
    "core/runtime/device.py",
    "core/runtime/rank_warnings.py",
    "core/comm/communicator.py",
)


class Diary:
    """Tasks and works write down when they start and when they are waited for."""

    def __init__(self) -> None:
        self.runtime = HostRuntime()
        self.synchronize = self.runtime.synchronize
        self.abandon = self.runtime.abandon
        self.lines: list[str] = []
        self.events: dict[str, Any] = {}

    def submit(self, role: str, name: str, works: int = 0) -> None:
        def task() -> list[Any]:
            self.lines.append(f"start {name}")
            found = []
            for number in range(works):
                work = f"{name}{number}" if works > 1 else name
                found.append(SimpleNamespace(wait=partial(self.lines.append, f"wait {work}")))
            return found

        self.runtime.submit(role, task)

    def record(self, role: str, name: str = "last") -> None:
        self.events[name] = self.runtime.record(role)

    def wait(self, role: str, event: str = "last") -> None:
        self.runtime.wait(role, self.events[event])


Steps = Callable[[Diary], None]
QUEUES: dict[str, tuple[Steps, str]] = {}
"""What is done, and what the diary says of it."""


def queue(name: str, expected: str) -> Callable[[Steps], Steps]:
    """Decorator: a row of `QUEUES`."""

    def add(steps: Steps) -> Steps:
        QUEUES[name] = (steps, expected)
        return steps

    return add


@queue("work starts at once and is not waited for", "start a")
def _runs_at_once(diary):
    diary.submit(GATHER, "a", 1)


@queue("what comes behind running work is deferred", "start a")
def _waits_behind(diary):
    diary.submit(GATHER, "a", 2)
    diary.submit(GATHER, "b")
    diary.submit(GATHER, "c", 1)


@queue("what is deferred comes in order", "start a, wait a0, wait a1, start b, start c, wait c")
def _in_order(diary):
    diary.submit(GATHER, "a", 2)
    diary.submit(GATHER, "b")
    diary.submit(GATHER, "c", 1)
    diary.record(GATHER)
    diary.wait(COMPUTE)


@queue("tasks without work run inline", "start a, start b")
def _inline(diary):
    diary.submit(GATHER, "a")
    diary.submit(GATHER, "b")


@queue("an event is waited for and not more", "start a, wait a")
def _one_event(diary):
    diary.submit(GATHER, "a", 1)
    diary.record(GATHER)
    diary.submit(GATHER, "b", 1)
    diary.wait(COMPUTE)
    diary.wait(COMPUTE)


@queue("a later event is waited for as well", "start a, wait a, start b, wait b")
def _two_events(diary):
    diary.submit(GATHER, "a", 1)
    diary.record(GATHER, "first")
    diary.submit(GATHER, "b", 1)
    diary.record(GATHER)
    diary.wait(COMPUTE, "first")
    diary.wait(COMPUTE)


@queue("an event of an idle role has happened", "start a, start b")
def _idle_role(diary):
    diary.record(REDUCE)
    diary.wait(COMPUTE)
    diary.submit(REDUCE, "a")
    diary.record(REDUCE)
    diary.submit(REDUCE, "b", 1)
    diary.wait(COMPUTE)


@queue("roles do not wait for each other unasked", "start g, start r, wait r")
def _two_roles(diary):
    diary.submit(GATHER, "g", 1)
    diary.submit(REDUCE, "r", 1)
    diary.record(REDUCE)
    diary.wait(COMPUTE)


@queue("a background role waits for another", "start g, wait g, start r")
def _role_after_role(diary):
    diary.submit(GATHER, "g", 1)
    diary.record(GATHER)
    diary.wait(REDUCE)
    diary.submit(REDUCE, "r")


@queue("a role is in its own order already", "start a")
def _own_order(diary):
    diary.submit(GATHER, "a", 1)
    diary.record(GATHER)
    diary.wait(GATHER)


@queue("waiting for compute is free", "start a")
def _compute_event(diary):
    diary.submit(GATHER, "a", 1)
    diary.record(COMPUTE)
    diary.wait(GATHER)


@queue(
    "synchronize empties every queue", "start a, start c, wait a, start b, wait b, wait c, start d"
)
def _synchronized(diary):
    diary.submit(GATHER, "a", 1)
    diary.submit(GATHER, "b", 1)
    diary.submit(REDUCE, "c", 1)
    diary.synchronize()
    diary.submit(GATHER, "d")


@queue("abandoned tasks never start and the queue goes on", "start a, start c")
def _abandoned(diary):
    diary.submit(GATHER, "a", 1)
    diary.submit(GATHER, "b")
    diary.record(GATHER)
    diary.abandon()
    diary.wait(COMPUTE)
    diary.submit(GATHER, "c")


@pytest.mark.parametrize("name", QUEUES)
def test_queues(name):
    steps, expected = QUEUES[name]
    diary = Diary()
    steps(diary)
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
    assert diary.lines == ["start b"]
    assert task.call_count == 1
    assert late.call_count == 2


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
    asked = torch.device(device)
    if expected is None:
        with pytest.raises(ValueError, match=rf"'{backend}' has no known .* '{device}'. Use"):
            is_stream_ordered(None, asked)  # type: ignore[arg-type]
    else:
        found = is_stream_ordered(None, asked)  # type: ignore[arg-type]
        assert found is STREAM_ORDERED[expected]


def test_a_group_of_one_launches_nothing(monkeypatch):
    monkeypatch.setattr(comm, "is_stream_ordered", lambda group, device: False)
    with pretended_world(1):
        one = Communicator(dist.group.WORLD, torch.device("cpu"))
    source = torch.arange(3.0)
    target = torch.zeros(2, 3)
    assert one.all_gather([(target[0], source)]) == []
    assert one.reduce_scatter([(target[1], source)]) == []
    assert one.all_reduce([source]) == []
    assert one.all_gather([(source, source)]) == []
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

    def ordered(*_):
        return STREAM_ORDERED[backend]

    monkeypatch.setattr(comm, "is_stream_ordered", ordered)
    monkeypatch.setattr(comm, "_all_gather", told._all_gather)
    monkeypatch.setattr(comm, "_reduce_scatter", told._reduce_scatter)
    monkeypatch.setattr(dist, "all_reduce", told.all_reduce)
    monkeypatch.setattr(comm, "_coalescing_manager", told.coalesced)
    with pretended_world(2):
        two = Communicator(dist.group.WORLD, torch.device("cpu"))
        launch = getattr(two, method)
        if method == "all_reduce":
            one = torch.zeros(4)
        else:
            one = (torch.zeros(4), torch.zeros(4))
        works = launch([one, one])
        assert len(works) == returned
        assert [name for name, _, _ in told.mock_calls] == launched
        launch([one])
    assert told.mock_calls[-1][0] == launched[-2], "alone it is not coalesced"
    options = [given for _, _, given in told.mock_calls]
    asked = {given["async_op"] for given in options if "async_op" in given}
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


def test_memory_for_the_host_is_there_whatever_the_default_device() -> None:
    """Programs set it to "cuda", for which "meta" stands here."""
    copied = []
    empty = torch.empty

    def kept(*size: Any, **options: Any) -> torch.Tensor:
        copied.append(options["device"])
        return empty(*size, **{**options, "pin_memory": False})

    with torch.device("meta"):
        assert make_runtime(torch.device("cpu")).host_memory(8).device.type == "cpu"
        assert host_pages(0).device.type == "cpu"
        with mock.patch("torch.empty", kept), mock.patch("torch.cuda.Event"):
            CudaRuntime.fetch(mock.Mock(), torch.ones(2, device="cpu"))
    assert copied == ["cpu"]
