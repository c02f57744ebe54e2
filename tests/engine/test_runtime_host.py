"""The host runtime's queues, and what each backend can do."""

from __future__ import annotations

import contextlib
import warnings

import pytest
import torch
import torch.distributed as dist

from megatron_fsdp_adapter.core.runtime import comm
from megatron_fsdp_adapter.core.runtime.comm import CAPABILITIES, Communicator, capabilities_of
from megatron_fsdp_adapter.core.runtime.device import (
    COMPUTE,
    GATHER,
    REDUCE,
    HostRuntime,
    make_runtime,
)
from megatron_fsdp_adapter.core.runtime.rank_warnings import warn
from tests.engine.pretended import pretended_world


class Diary:
    """Tasks and works that write down when they start and when they are waited for."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def task(self, name: str, works: int = 0):
        def run():
            self.lines.append(f"start {name}")
            return [self.work(f"{name}{i}" if works > 1 else name) for i in range(works)]

        return run

    def work(self, name: str):
        diary = self

        class Work:
            def wait(self) -> None:
                diary.lines.append(f"wait {name}")

        return Work()


@pytest.fixture
def diary():
    return Diary()


@pytest.fixture
def runtime():
    return HostRuntime()


def test_work_starts_at_once_and_is_not_waited_for(runtime, diary):
    runtime.submit(GATHER, diary.task("a", works=1))
    assert diary.lines == ["start a"]


def test_what_comes_behind_running_work_is_deferred_in_order(runtime, diary):
    runtime.submit(GATHER, diary.task("a", works=2))
    runtime.submit(GATHER, diary.task("b"))
    runtime.submit(GATHER, diary.task("c", works=1))
    assert diary.lines == ["start a"]
    runtime.wait(COMPUTE, runtime.record(GATHER))
    assert diary.lines == ["start a", "wait a0", "wait a1", "start b", "start c", "wait c"]


def test_tasks_without_work_run_inline(runtime, diary):
    runtime.submit(GATHER, diary.task("a"))
    runtime.submit(GATHER, diary.task("b"))
    assert diary.lines == ["start a", "start b"]


def test_an_event_is_waited_for_and_not_more(runtime, diary):
    runtime.submit(GATHER, diary.task("a", works=1))
    first = runtime.record(GATHER)
    runtime.submit(GATHER, diary.task("b", works=1))
    second = runtime.record(GATHER)
    runtime.wait(COMPUTE, first)
    assert diary.lines == ["start a", "wait a"]
    runtime.wait(COMPUTE, first)
    assert diary.lines == ["start a", "wait a"]
    runtime.wait(COMPUTE, second)
    assert diary.lines == ["start a", "wait a", "start b", "wait b"]


def test_an_event_of_an_idle_role_has_happened(runtime, diary):
    runtime.wait(COMPUTE, runtime.record(REDUCE))
    runtime.submit(REDUCE, diary.task("a"))
    event = runtime.record(REDUCE)
    runtime.submit(REDUCE, diary.task("b", works=1))
    runtime.wait(COMPUTE, event)
    assert diary.lines == ["start a", "start b"]


def test_roles_do_not_wait_for_each_other_unasked(runtime, diary):
    runtime.submit(GATHER, diary.task("g", works=1))
    runtime.submit(REDUCE, diary.task("r", works=1))
    assert diary.lines == ["start g", "start r"]
    runtime.wait(COMPUTE, runtime.record(REDUCE))
    assert diary.lines == ["start g", "start r", "wait r"]


def test_a_background_role_waits_for_another(runtime, diary):
    runtime.submit(GATHER, diary.task("g", works=1))
    runtime.wait(REDUCE, runtime.record(GATHER))
    runtime.submit(REDUCE, diary.task("r"))
    assert diary.lines == ["start g", "wait g", "start r"]


def test_a_role_is_in_its_own_order_already(runtime, diary):
    runtime.submit(GATHER, diary.task("a", works=1))
    runtime.wait(GATHER, runtime.record(GATHER))
    assert diary.lines == ["start a"]


def test_waiting_for_compute_is_free(runtime, diary):
    runtime.submit(GATHER, diary.task("a", works=1))
    runtime.wait(GATHER, runtime.record(COMPUTE))
    assert diary.lines == ["start a"]


def test_synchronize_empties_every_queue(runtime, diary):
    for role in (GATHER, REDUCE):
        runtime.submit(role, diary.task(f"{role} a", works=1))
        runtime.submit(role, diary.task(f"{role} b", works=1))
    runtime.synchronize()
    assert len(diary.lines) == 8
    runtime.submit(GATHER, diary.task("c"))
    assert diary.lines[-1] == "start c"


def test_abandoned_tasks_never_start_and_the_queue_goes_on(runtime, diary):
    runtime.submit(GATHER, diary.task("a", works=1))
    runtime.submit(GATHER, diary.task("b"))
    event = runtime.record(GATHER)
    runtime.abandon()
    runtime.wait(COMPUTE, event)
    runtime.submit(GATHER, diary.task("c"))
    assert diary.lines == ["start a", "start c"]


def test_a_task_that_raises_is_raised_where_it_is_waited_for(runtime, diary):
    runtime.submit(GATHER, diary.task("a", works=1))
    runtime.submit(GATHER, lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        runtime.wait(COMPUTE, runtime.record(GATHER))


def test_a_wait_that_is_interrupted_starts_nothing_twice(runtime, diary):
    class Interrupted:
        def wait(self) -> None:
            diary.lines.append("wait")
            if diary.lines.count("wait") == 1:
                raise KeyboardInterrupt

    def collective():
        diary.lines.append("start late")
        return [Interrupted()]

    runtime.submit(GATHER, diary.task("a", works=1))
    runtime.submit(GATHER, collective)
    with pytest.raises(KeyboardInterrupt):
        runtime.wait(COMPUTE, runtime.record(GATHER))
    runtime.wait(COMPUTE, runtime.record(GATHER))
    assert diary.lines == ["start a", "wait a", "start late", "wait", "wait"]


def test_storage_comes_and_goes(runtime):
    flat = torch.arange(4.0)
    runtime.allocate(flat)
    assert flat.tolist() == [0.0, 1.0, 2.0, 3.0]
    runtime.release(flat)
    assert flat.untyped_storage().nbytes() == 0
    runtime.allocate(flat)
    assert flat.untyped_storage().nbytes() == 16


def test_runtimes_of_devices():
    assert isinstance(make_runtime(torch.device("cpu")), HostRuntime)
    with pytest.raises(ValueError, match="device=meta: only 'cuda' and 'cpu'"):
        make_runtime(torch.device("meta"))


# Capabilities.


@pytest.mark.parametrize(
    ("backend", "device", "expected"),
    [
        ("gloo", "cpu", "gloo"),
        ("nccl", "cuda", "nccl"),
        ("cpu:gloo,cuda:nccl", "cpu", "gloo"),
        ("cpu:gloo,cuda:nccl", "cuda", "nccl"),
        ("cuda:nccl,cpu:gloo", "cpu", "gloo"),
    ],
)
def test_capabilities_are_those_of_the_device_s_backend(monkeypatch, backend, device, expected):
    monkeypatch.setattr(comm.dist, "get_backend", lambda group: backend)
    found = capabilities_of(None, torch.device(device))  # type: ignore[arg-type]
    assert found is CAPABILITIES[expected]


@pytest.mark.parametrize(("backend", "device"), [("fake", "cpu"), ("cpu:gloo", "cuda"),
                                                 ("cpu:mpi,cuda:nccl", "cpu")])  # fmt: skip
def test_unknown_backends_are_refused(monkeypatch, backend, device):
    monkeypatch.setattr(comm.dist, "get_backend", lambda group: backend)
    with pytest.raises(ValueError, match=rf"backend='{backend}' has no known .* '{device}'; use"):
        capabilities_of(None, torch.device(device))  # type: ignore[arg-type]


def test_a_group_of_one_launches_nothing(monkeypatch):
    monkeypatch.setattr(comm, "capabilities_of", lambda group, device: CAPABILITIES["gloo"])
    with pretended_world(1):
        one = Communicator(dist.group.WORLD, torch.device("cpu"))
        source, target = torch.arange(3.0), torch.zeros(3)
        assert one.all_gather([(target, source)]) == []
        assert torch.equal(target, source)
        target.zero_()
        assert one.reduce_scatter([(target, source)]) == []
        assert torch.equal(target, source)
        assert one.all_reduce([source]) == [] and one.all_gather([(source, source)]) == []
        one.broadcast(source)
        assert torch.equal(source, target)


class Launches:
    """Stands in for the collectives of a backend."""

    def __init__(self, monkeypatch, backend: str) -> None:
        self.calls: list[str] = []
        monkeypatch.setattr(comm, "capabilities_of", lambda group, device: CAPABILITIES[backend])
        for name in ("_all_gather", "_reduce_scatter"):
            monkeypatch.setattr(comm, name, self.collective(name))
        monkeypatch.setattr(comm.dist, "all_reduce", self.collective("all_reduce"))
        monkeypatch.setattr(comm, "_coalescing_manager", self.coalesced)

    def collective(self, name: str):
        def call(*tensors, group, async_op):
            self.calls.append(f"{name} {'async' if async_op else 'enqueued'}")
            return name

        return call

    def coalesced(self, **options):
        launches = self

        class Manager:
            def __enter__(self):
                launches.calls.append("begin")

            def __exit__(self, *error):
                launches.calls.append("end")

        return Manager()


def test_gloo_returns_one_work_a_collective(monkeypatch):
    launches = Launches(monkeypatch, "gloo")
    with pretended_world(2):
        two = Communicator(dist.group.WORLD, torch.device("cpu"))
        pairs = [(torch.zeros(4), torch.zeros(2))] * 2
        assert two.all_gather(pairs) == ["_all_gather"] * 2
        assert two.reduce_scatter([(b, a) for a, b in pairs]) == ["_reduce_scatter"] * 2
        assert two.all_reduce([torch.zeros(2)]) == ["all_reduce"]
    assert launches.calls == ["_all_gather async"] * 2 + ["_reduce_scatter async"] * 2 + [
        "all_reduce async"
    ]


def test_nccl_coalesces_and_leaves_order_to_the_stream(monkeypatch):
    launches = Launches(monkeypatch, "nccl")
    with pretended_world(2):
        two = Communicator(dist.group.WORLD, torch.device("cpu"))
        pair = (torch.zeros(4), torch.zeros(2))
        assert two.all_gather([pair, pair]) == [] and two.all_gather([pair]) == []
    assert launches.calls == [
        "begin", "_all_gather enqueued", "_all_gather enqueued", "end", "_all_gather enqueued",
    ]  # fmt: skip


@pytest.mark.parametrize("is_known", (False, True))
@pytest.mark.parametrize(
    ("rank", "local", "of_host", "expected"),
    [(0, 0, False, 1), (1, 1, False, 0), (8, 0, False, 0), (8, 0, True, 1), (9, 1, True, 0)],
)
def test_a_warning_is_said_by_one_rank(is_known, rank, local, of_host, expected, monkeypatch):
    """With a process group, and before there is one."""
    monkeypatch.setenv("RANK", str(0 if is_known else rank))
    monkeypatch.setenv("LOCAL_RANK", str(local))
    world = pretended_world(16, rank) if is_known else contextlib.nullcontext()
    with world, warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        warn("slower", of_host=of_host)
    assert len(found) == expected
