"""The recording runtime itself: what it takes for a race, and what it does not."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from megatron_fsdp_adapter.core.runtime.device import COMPUTE, GATHER, REDUCE
from tests.engine.pretended import pretended_world
from tests.engine.recording import RaceError, RecordingRuntime


class Bench:
    """A runtime with one buffer "b" of 8 elements that compute has written, and all roles have
    waited for."""

    def __init__(self) -> None:
        self.runtime, self.flat = RecordingRuntime(), torch.zeros(8)
        self.runtime.label(self.flat, "b")
        self.events: dict[str, Any] = {}

    def on(self, role: str, function: Callable[..., Any], *args: Any) -> None:
        def task() -> None:
            function(*args)

        self.runtime.submit(role, task)

    def play(self, step: str) -> None:
        """ "gather write 0:4": `gather` writes elements of the buffer; it may read, write, allocate
        or release. "compute < gather": one waits for the other. "gather record" is an event that
        "compute after" waits for."""
        role, action, *rest = step.split()
        runtime = self.runtime
        if action == "<":
            runtime.wait(role, runtime.record(rest[0]))
        elif action == "record":
            self.events["last"] = runtime.record(role)
        elif action == "after":
            runtime.wait(role, self.events["last"])
        else:
            ends = [int(end) if end else None for part in rest for end in part.split(":")]
            flat = self.flat[slice(*ends)] if ends else self.flat
            do = {"read": lambda: flat + 1, "write": lambda: flat.fill_(2.0),
                  "allocate": lambda: runtime.allocate(flat),
                  "release": lambda: runtime.release(flat)}[action]  # fmt: skip
            self.on(role, do)


@pytest.fixture
def bench():
    made = Bench()
    with made.runtime.watch():
        made.runtime.synchronize()
        yield made


RACES: dict[str, list[str | tuple[str, str]]] = {
    **{
        f"{second} on {other} after {first} on {one}": [
            f"{one} {first}",
            (f"{other} {second}", rf"{other}: .*{second} of b without waiting for {one}"),
            f"{other} < {one}", f"{other} {second}",
        ]
        for first, second in (("read", "write"), ("write", "read"), ("write", "write"))
        for one, other in ((COMPUTE, GATHER), (GATHER, REDUCE), (REDUCE, COMPUTE))
    },
    "reads do not conflict, but a write waits for all of them": [
        "gather read", "reduce read", "compute read", "compute < gather",
        ("compute write", "without waiting for reduce"), "compute < reduce", "compute write",
    ],
    "an event carries what its role had waited for": [
        "gather write", "reduce < gather", "compute < reduce", "compute read",
    ],
    "an event does not cover what came after it": [
        "gather record", "gather write", "compute after", ("compute read", "without waiting"),
    ],
    "parts that do not overlap do not conflict": [
        "gather write :4", "compute read 4:", ("compute read 3:", "without waiting"),
        ("compute read 1:6:4", "without waiting"),
    ],
    "released storage is not used on any role": [
        "compute release", ("compute read", "read of b, which is released"),
        ("gather read", "read of b, which is released"),
    ],
    "a release waits for uses elsewhere": [
        "gather read", ("compute release", "release of b without waiting for gather"),
        "compute < gather", "compute release",
    ],
    "a release belongs on the role that allocated": [
        ("gather release", "gather releases b, which compute allocated"), "compute release",
        "reduce allocate", "reduce release",
    ],
    "an allocation must have happened before a use elsewhere": [
        "compute release", "gather allocate",
        ("compute write", "write of b without waiting for gather:  allocate"),
    ],
    "what is allocated is undefined until all of it is written": [
        "compute release", "compute allocate", ("compute read", "not written yet"),
        "compute write :3", "compute write 5:", "compute read :3",
        ("compute read", "not written yet"), "compute write 3:5", "compute read",
    ],
    "to allocate or release twice does nothing": [
        "compute allocate", "compute read", "compute release", "compute release",
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", RACES)
def test_what_is_a_race(bench, name):
    for step in RACES[name]:
        if isinstance(step, str):
            bench.play(step)
        else:
            with pytest.raises(RaceError, match=step[1]):
                bench.play(step[0])


def test_the_order_of_the_program_is_no_order_between_roles():
    made = Bench()
    with made.runtime.watch():
        made.flat.fill_(1.0)
        made.flat.sum().item()
        with pytest.raises(RaceError):
            made.play("gather read")


def test_storage_is_nan_when_it_is_allocated(bench):
    for step in ("compute release", "compute allocate"):
        bench.play(step)
    with torch._C._DisableTorchDispatch():
        assert torch.isnan(bench.flat).all()


def test_views_and_metadata_read_nothing(bench):
    bench.play("gather write")
    view = bench.flat.view(2, 4).t().detach()[0]
    torch.empty_like(view), torch.zeros_like(bench.flat), bench.flat.new_empty(3)
    for read in (lambda: view + 1, lambda: bench.flat.view(2, 4).t()[1:2] + 1):
        with pytest.raises(RaceError):
            read()


def _backward(flat: torch.Tensor, other: torch.Tensor) -> None:
    x = other.clone().requires_grad_()
    (x * flat.detach()).sum().backward()


def _wrapped(flat: torch.Tensor, other: torch.Tensor) -> None:
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    DTensor.from_local(flat, mesh, [Shard(0)], run_check=False).mul_(2.0)


OPERATIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "foreach, written": lambda flat, other: torch._foreach_copy_([flat], [other]),
    "foreach, read": lambda flat, other: torch._foreach_copy_([other], [flat]),
    "out=": lambda flat, other: torch.add(other, 1, out=flat),
    "in place": lambda flat, other: other.add_(flat),
    "a list": lambda flat, other: torch.cat([other, flat]),
    "a keyword": lambda flat, other: torch.where(condition=other > 0, input=other, other=flat),
    "backward": _backward,
    "a tensor inside of a DTensor": _wrapped,
    "a collective, written": lambda flat, other: dist.all_gather_into_tensor(flat, other[:4]),
    "a collective, read": lambda flat, other: dist.all_gather_into_tensor(other.repeat(2), flat),
    "a collective, in place": lambda flat, other: dist.all_reduce(flat),
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_kinds_of_operations(bench, operation):
    bench.play("gather write")
    with pretended_world(2), pytest.raises(RaceError, match="without waiting for gather"):
        OPERATIONS[operation](bench.flat, torch.ones(8))


def test_backward_reads_what_forward_saved(bench):
    x = torch.ones(8, requires_grad=True)
    loss = (x * bench.flat).sum()
    bench.play("gather < compute")
    bench.on(GATHER, bench.flat.detach().fill_, 2.0)
    with pytest.raises((RaceError, RuntimeError), match=r"without waiting|an inplace"):
        loss.backward()


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_temporary_that_crosses_roles_must_be_kept_alive(is_kept):
    made, message = Bench(), "ended on compute without waiting for reduce: neg read"
    expected = pytest.raises(RaceError, match=message) if not is_kept else made.runtime.watch()
    with expected, made.runtime.watch():
        temporary = torch.ones(4)
        made.play("reduce < compute")
        made.on(REDUCE, torch.neg, temporary)
        if is_kept:
            made.play("compute < reduce")
        del temporary


def test_an_error_in_a_task_leaves_the_role():
    runtime = RecordingRuntime()
    with pytest.raises(ZeroDivisionError):
        runtime.submit(GATHER, lambda: 1 / 0)  # type: ignore[arg-type]
    runtime.mark("after")
    assert runtime.log[-1].role == COMPUTE


def test_works_are_waited_for_where_they_were_submitted():
    runtime = RecordingRuntime()
    work = SimpleNamespace(wait=lambda: runtime.mark("waited"))
    runtime.submit(REDUCE, lambda: [work, work])
    assert [(entry.role, entry.what) for entry in runtime.log] == [(REDUCE, "waited")] * 2


def test_the_log_has_labeled_buffers_only(bench):
    torch.ones(3) + 1
    bench.flat[2:4].add_(1)
    bench.runtime.mark("here")
    bench.play("gather < compute")
    lines = [(e.role, e.action, e.what, e.op, e.nbytes) for e in bench.runtime.log]
    assert lines == [
        (COMPUTE, "write", "b", "add_", 8),
        (COMPUTE, "mark", "here", "", 0),
        (COMPUTE, "record", COMPUTE, "", 0),
        (GATHER, "wait", COMPUTE, "", 0),
    ]


def test_outside_watch_nothing_is_checked():
    other = Bench()
    other.play("gather write")
    assert other.runtime.log == []
