"""The recording runtime itself: memory that comes and goes. That it sees a missing order of any
other kind: test_engine_orders.py, where each is left out once."""

from __future__ import annotations

import pytest
import torch

from tests.engine.recording import RaceError, RecordingRuntime


class Bench:
    """A runtime with one buffer "b" of 8 elements that compute has written, and all roles have
    waited for."""

    def __init__(self) -> None:
        self.runtime, self.flat = RecordingRuntime(), torch.zeros(8)
        self.runtime.label(self.flat, "b")

    def play(self, step: str) -> None:
        """ "gather write 0:4": `gather` writes elements of the buffer; it may read, write, allocate
        or release. "compute < gather": one waits for the other."""
        role, action, *rest = step.split()
        runtime = self.runtime
        if action == "<":
            runtime.wait(role, runtime.record(rest[0]))
        else:
            ends = [int(end) if end else None for part in rest for end in part.split(":")]
            flat = self.flat[slice(*ends)] if ends else self.flat
            do = {"read": lambda: flat + 1, "write": lambda: flat.fill_(2.0),
                  "allocate": lambda: runtime.allocate(flat),
                  "release": lambda: runtime.release(flat)}[action]  # fmt: skip

            def task() -> None:
                do()

            runtime.submit(role, task)


@pytest.fixture
def bench():
    made = Bench()
    with made.runtime.watch():
        made.runtime.synchronize()
        yield made


RACES: dict[str, list[str | tuple[str, str]]] = {
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


def test_storage_is_nan_when_it_is_allocated(bench):
    for step in ("compute release", "compute allocate"):
        bench.play(step)
    with torch._C._DisableTorchDispatch():
        assert torch.isnan(bench.flat).all()
