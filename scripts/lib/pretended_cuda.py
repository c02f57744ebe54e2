"""What the host does for a GPU, on a machine without one: streams, events and collectives that do
nothing, at the cost in Python that torch's have. Operations are those of the CPU, on tensors so
small that they take what a launch takes."""

from __future__ import annotations

import types
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch.testing._internal.distributed.fake_pg import FakeStore

from lib.distributed import Place
from megatron_fsdp_adapter.core.runtime import comm, device
from megatron_fsdp_adapter.diagnostics import fault_report
from megatron_fsdp_adapter.launch.cpu_mode import enable_cpu_mode
from megatron_fsdp_adapter.sharding import building

COUNTS: Counter[str] = Counter()
"""Calls, by name."""


class Stream:
    def __new__(cls, *args: Any, **kwargs: Any) -> Stream:
        return super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.stream_id, self.device_index, self.device_type = 0, 0, 1

    def wait_event(self, event: Event) -> None:
        COUNTS["waits for events"] += 1


class Event:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        COUNTS["events made"] += 1

    def record(self, stream: Stream | None = None) -> None:
        COUNTS["events recorded"] += 1

    def synchronize(self) -> None:
        """Nothing runs."""


def _get_stream(index: int) -> tuple[int, int, int]:
    COUNTS["current stream asked for"] += 1
    return 0, 0, 1


def _set_stream(stream_id: int, device_index: int, device_type: int) -> None:
    COUNTS["streams set"] += 1


def _current_stream(index: int) -> Stream:
    found = _get_stream(index)
    return Stream(stream_id=found[0], device_index=found[1], device_type=found[2])


def _set_stream_object(stream: Stream) -> None:
    _set_stream(stream.stream_id, stream.device_index, stream.device_type)


class _Instead:
    """A module of torch's with some names replaced."""

    def __init__(self, module: Any, **names: Any) -> None:
        self._module = module
        vars(self).update(names)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class PretendedRuntime(device.CudaRuntime):
    def fetch(self, tensor: torch.Tensor) -> Any:
        return tensor.tolist

    def synchronize(self) -> None:
        """Nothing runs."""


def start(world_size: int) -> Place:
    """A world of which this process is the first rank, and the only one."""
    enable_cpu_mode()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    make_group = parallel_state.create_group

    def create_group(*args: Any, **kwargs: Any) -> Any:
        return make_group(*args, **{**kwargs, "backend": "fake"})

    parallel_state.create_group = create_group
    parallel_state.initialize_model_parallel()
    comm.CAPABILITIES["fake"] = comm.Capabilities(stream_ordered=True, coalesces=False)
    fault_report.timeout_of = lambda group, device: 600.0
    cuda = types.SimpleNamespace(
        Stream=Stream, Event=Event, current_stream=_current_stream, set_stream=_set_stream_object,
        current_device=lambda: 0, is_current_stream_capturing=lambda: False,
    )  # fmt: skip
    inside = _Instead(torch._C, _cuda_getCurrentStream=_get_stream, _cuda_setStream=_set_stream)
    device.torch = _Instead(torch, cuda=cuda, _C=inside)
    building.make_runtime = PretendedRuntime
    torch.set_num_threads(1)
    return Place(0, world_size, 0, world_size, torch.device("cpu"))
