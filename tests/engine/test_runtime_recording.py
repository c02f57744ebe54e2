"""The recording runtime itself: what it takes for a race, and what it does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from megatron_fsdp_adapter.core.runtime.device import COMPUTE, GATHER, REDUCE
from tests.engine.pretended import pretended_world
from tests.engine.recording import RaceError, RecordingRuntime


class Bench:
    """A runtime with one buffer "b" of 8 elements that compute has written."""

    def __init__(self) -> None:
        self.runtime = RecordingRuntime()
        self.flat = torch.zeros(8)
        self.runtime.label(self.flat, "b")

    def on(self, role: str, function: Callable[..., Any], *args: Any) -> None:
        def task() -> None:
            function(*args)

        self.runtime.submit(role, task)

    def join(self, waiting: str, recorded: str) -> None:
        self.runtime.wait(waiting, self.runtime.record(recorded))


@pytest.fixture
def bench():
    made = Bench()
    with made.runtime.watch():
        yield made


ACCESSES: dict[str, Callable[[torch.Tensor], Any]] = {
    "read": lambda flat: flat + 1,
    "write": lambda flat: flat.fill_(2.0),
}


@pytest.mark.parametrize(("first", "second"), [("read", "write"), ("write", "read"),
                                               ("write", "write")])  # fmt: skip
@pytest.mark.parametrize(("one", "other"), [(COMPUTE, GATHER), (GATHER, REDUCE), (REDUCE, COMPUTE)])
def test_conflicting_uses_need_an_event_between(bench, first, second, one, other):
    bench.runtime.synchronize()
    bench.on(one, ACCESSES[first], bench.flat)
    with pytest.raises(RaceError, match=rf"{other}: .*{second} of b without waiting for {one}"):
        bench.on(other, ACCESSES[second], bench.flat)
    bench.join(other, one)
    bench.on(other, ACCESSES[second], bench.flat)


def test_reads_do_not_conflict_but_a_write_waits_for_all_of_them(bench):
    bench.runtime.synchronize()
    for role in (GATHER, REDUCE):
        bench.on(role, ACCESSES["read"], bench.flat)
    bench.flat + 1
    bench.join(COMPUTE, GATHER)
    with pytest.raises(RaceError, match="without waiting for reduce"):
        bench.flat.zero_()
    bench.join(COMPUTE, REDUCE)
    bench.flat.zero_()


def test_an_event_carries_what_its_role_had_waited_for(bench):
    bench.runtime.synchronize()
    bench.on(GATHER, ACCESSES["write"], bench.flat)
    bench.join(REDUCE, GATHER)
    bench.join(COMPUTE, REDUCE)
    bench.flat + 1


def test_an_event_does_not_cover_what_came_after_it(bench):
    bench.runtime.synchronize()
    event = bench.runtime.record(GATHER)
    bench.on(GATHER, ACCESSES["write"], bench.flat)
    bench.runtime.wait(COMPUTE, event)
    with pytest.raises(RaceError):
        bench.flat + 1


def test_the_order_of_the_program_is_no_order_between_roles(bench):
    bench.flat.fill_(1.0)
    bench.flat.sum().item()
    with pytest.raises(RaceError):
        bench.on(GATHER, ACCESSES["read"], bench.flat)


def test_parts_that_do_not_overlap_do_not_conflict(bench):
    bench.runtime.synchronize()
    bench.on(GATHER, ACCESSES["write"], bench.flat[:4])
    bench.flat[4:] + 1
    with pytest.raises(RaceError):
        bench.flat[3:] + 1
    with pytest.raises(RaceError):
        bench.flat.view(2, 4).t()[1:2] + 1  # strided: elements 1 and 5


def test_views_and_metadata_read_nothing(bench):
    bench.runtime.synchronize()
    bench.on(GATHER, ACCESSES["write"], bench.flat)
    view = bench.flat.view(2, 4).t().detach()[0]
    torch.empty_like(view), torch.zeros_like(bench.flat), bench.flat.new_empty(3)
    with pytest.raises(RaceError):
        view + 1


OPERATIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "foreach, written": lambda flat, other: torch._foreach_copy_([flat], [other]),
    "foreach, read": lambda flat, other: torch._foreach_copy_([other], [flat]),
    "out=": lambda flat, other: torch.add(other, 1, out=flat),
    "in place": lambda flat, other: other.add_(flat),
    "a list": lambda flat, other: torch.cat([other, flat]),
    "a keyword": lambda flat, other: torch.where(condition=other > 0, input=other, other=flat),
    "backward": lambda flat, other: _backward(flat, other),
}


def _backward(flat: torch.Tensor, other: torch.Tensor) -> None:
    x = other.clone().requires_grad_()
    (x * flat.detach()).sum().backward()


@pytest.mark.parametrize("operation", OPERATIONS)
def test_kinds_of_operations(bench, operation):
    other = torch.ones(8)
    bench.runtime.synchronize()
    bench.on(GATHER, ACCESSES["write"], bench.flat)
    with pytest.raises(RaceError, match="without waiting for gather"):
        OPERATIONS[operation](bench.flat, other)


def test_backward_reads_what_forward_saved(bench):
    x = torch.ones(8, requires_grad=True)
    loss = (x * bench.flat).sum()
    bench.join(GATHER, COMPUTE)
    bench.on(GATHER, ACCESSES["write"], bench.flat.detach())
    with pytest.raises((RaceError, RuntimeError), match=r"without waiting|an inplace"):
        loss.backward()


def test_collectives_write_their_first_argument_and_read_the_rest():
    made = Bench()
    with pretended_world(2), made.runtime.watch():
        other = torch.ones(4)
        made.runtime.synchronize()
        made.on(GATHER, ACCESSES["write"], other)
        with pytest.raises(RaceError, match=r"gather.* read of an unnamed tensor"):
            dist.all_gather_into_tensor(made.flat, other)
        made.join(COMPUTE, GATHER)
        dist.all_gather_into_tensor(made.flat, other)
        made.join(GATHER, COMPUTE)
        made.on(GATHER, ACCESSES["read"], made.flat)
        with pytest.raises(RaceError, match="write of b without waiting for gather"):
            dist.all_gather_into_tensor(made.flat, other)
        with pytest.raises(RaceError, match="write of b without waiting for gather"):
            dist.all_reduce(made.flat)


def test_wrapped_tensors_are_looked_into():
    made = Bench()
    with pretended_world(2), made.runtime.watch():
        mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
        wrapped = DTensor.from_local(made.flat, mesh, [Shard(0)], run_check=False)
        made.runtime.synchronize()
        made.on(GATHER, ACCESSES["write"], made.flat)
        with pytest.raises(RaceError, match="mul_ write of b without waiting for gather"):
            wrapped.mul_(2.0)


def test_released_storage_is_not_used_on_any_role(bench):
    bench.runtime.release(bench.flat)
    assert bench.flat.untyped_storage().nbytes() == 0
    for role in (COMPUTE, GATHER):
        with pytest.raises(RaceError, match="read of b, which is released"):
            bench.on(role, ACCESSES["read"], bench.flat)
    assert bench.flat.view(2, 4).shape == (2, 4)


def test_release_waits_for_uses_elsewhere(bench):
    bench.join(GATHER, COMPUTE)
    bench.on(GATHER, ACCESSES["read"], bench.flat)
    with pytest.raises(RaceError, match="release of b without waiting for gather"):
        bench.runtime.release(bench.flat)
    bench.join(COMPUTE, GATHER)
    bench.runtime.release(bench.flat)


def test_release_belongs_on_the_role_that_allocated(bench):
    bench.join(GATHER, COMPUTE)
    with pytest.raises(RaceError, match="gather releases b, which compute allocated"):
        bench.on(GATHER, bench.runtime.release, bench.flat)
    bench.runtime.release(bench.flat)
    bench.on(REDUCE, bench.runtime.allocate, bench.flat)
    bench.on(REDUCE, bench.runtime.release, bench.flat)


def test_allocation_must_have_happened_before_use_elsewhere(bench):
    bench.runtime.release(bench.flat)
    bench.on(GATHER, bench.runtime.allocate, bench.flat)
    with pytest.raises(RaceError, match="write of b without waiting for gather:  allocate"):
        bench.flat.zero_()


def test_what_is_allocated_is_undefined_until_written(bench):
    bench.runtime.release(bench.flat)
    bench.runtime.allocate(bench.flat)
    with torch._C._DisableTorchDispatch():
        assert torch.isnan(bench.flat).all()
    with pytest.raises(RaceError, match="not written yet"):
        bench.flat + 1
    bench.flat[:3].zero_()
    bench.flat[5:].zero_()
    bench.flat[:3] + 1
    with pytest.raises(RaceError, match="not written yet"):
        bench.flat + 1
    bench.flat[3:5].zero_()
    bench.flat + 1


def test_allocate_and_release_twice_do_nothing(bench):
    bench.runtime.allocate(bench.flat)
    assert (bench.flat == 0).all()
    bench.runtime.release(bench.flat)
    bench.runtime.release(bench.flat)
    assert [entry.action for entry in bench.runtime.log if entry.what == "b"].count("release") == 1


def test_a_temporary_that_crosses_roles_must_be_kept_alive():
    made = Bench()
    message = "ended on compute without waiting for reduce: neg read"
    with pytest.raises(RaceError, match=message), made.runtime.watch():
        temporary = torch.ones(4)
        made.join(REDUCE, COMPUTE)
        made.on(REDUCE, torch.neg, temporary)
        del temporary
    kept = Bench()
    with kept.runtime.watch():
        temporary = torch.ones(4)
        kept.join(REDUCE, COMPUTE)
        kept.on(REDUCE, torch.neg, temporary)
        kept.join(COMPUTE, REDUCE)
        del temporary


def test_an_error_in_a_task_leaves_the_role():
    runtime = RecordingRuntime()
    with pytest.raises(ZeroDivisionError):
        runtime.submit(GATHER, lambda: 1 / 0)  # type: ignore[arg-type]
    runtime.mark("after")
    assert runtime.log[-1].role == COMPUTE


def test_works_are_waited_for_where_they_were_submitted():
    runtime, done = RecordingRuntime(), []

    class Work:
        def wait(self) -> None:
            runtime.mark("waited")
            done.append(self)

    runtime.submit(REDUCE, lambda: [Work(), Work()])
    assert len(done) == 2 and runtime.log[-1].role == REDUCE


def test_the_log_has_labeled_buffers_only(bench):
    torch.ones(3) + 1
    bench.flat[2:4].add_(1)
    bench.runtime.mark("here")
    bench.join(GATHER, COMPUTE)
    lines = [(e.role, e.action, e.what, e.op, e.nbytes) for e in bench.runtime.log]
    assert lines == [
        (COMPUTE, "write", "b", "add_", 8),
        (COMPUTE, "mark", "here", "", 0),
        (COMPUTE, "record", COMPUTE, "", 0),
        (GATHER, "wait", COMPUTE, "", 0),
    ]


def test_outside_watch_nothing_is_checked(bench):
    other = Bench()
    other.on(GATHER, ACCESSES["write"], other.flat)
    assert other.runtime.log == []
