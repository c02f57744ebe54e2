"""What a step costs the host."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

import megatron_fsdp_adapter
from megatron_fsdp_adapter.core.config import STRATEGIES
from megatron_fsdp_adapter.core.runtime.device import COMPUTE, HostRuntime
from tests.engine.engine_cases import Rig, Setup, build
from tests.engine.pretended import pretended_world
from tests.engine.traces import ZERO_3


class _Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


class CountedRuntime(HostRuntime):
    """Counts the operations that run on the gather and reduce streams."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: Counter[str] = Counter()

    def submit(self, role: str, *tasks: Any) -> None:
        assert role != COMPUTE
        with _Counting() as mode:
            super().submit(role, *tasks)
        self.operations.update(mode.calls)

    def launch(self, role: str, *tasks: Any) -> None:
        with _Counting() as mode:
            self._begin(role, tasks[0])
        self.operations.update(mode.calls)
        self.submit(role, *tasks[1:])


def step_cost(setup: Setup) -> tuple[Counter[str], Counter[str], Counter[str]]:
    """Of forward and backward of a step that knows the order: calls of the package's functions,
    operations on the gather and reduce streams, and operations on compute in `take_grads`."""
    folder = str(Path(megatron_fsdp_adapter.__file__).parent)
    calls: Counter[str] = Counter()

    def profile(frame: Any, event: str, arg: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(folder) and code.co_name[0] != "<":
            calls[code.co_name] += 1

    with pretended_world(2):
        rig = build(setup, CountedRuntime())
        taken = _count_operations_of(rig)
        rig.step()
        rig.step()
        rig.zero()
        rig.runtime.operations.clear()
        taken.clear()
        gc.disable()  # an earlier test's engine may be collected, whose finalizer would be counted
        sys.setprofile(profile)
        try:
            rig.forward_backward(2)
        finally:
            sys.setprofile(None)
            gc.enable()
    return calls, rig.runtime.operations, taken


def _count_operations_of(rig: Rig) -> Counter[str]:
    counted: Counter[str] = Counter()

    def wrap(original: Any) -> Any:
        def take_grads(accumulate: bool) -> None:
            with _Counting() as mode:
                original(accumulate)
            counted.update(mode.calls)

        return take_grads

    for group in rig.engine.groups:
        group.take_grads = wrap(group.take_grads)  # type: ignore[method-assign]
    return counted


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_host_cost_is_by_unit_and_not_by_parameter(strategy):
    few, many = (step_cost(Setup(strategy, width=width)) for width in (0, 20))
    grown = {name for name in few[0] | many[0] if few[0][name] != many[0][name]}
    assert not grown
    assert sum(many[0].values()) > 100
    assert many[1] == few[1] and many[2] == few[2]
    assert few[2]["aten::_foreach_copy_"] > 0


def test_host_cost_grows_with_units():
    """The counts above can tell: twice the layers cost more of everything."""
    few, many = (step_cost(Setup(ZERO_3, layers=layers)) for layers in (3, 6))
    for less, more in zip(few, many, strict=True):
        assert sum(more.values()) >= 1.5 * sum(less.values())
