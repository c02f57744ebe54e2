"""Splits a step of `fully_shard`, this package's or torch's, into parts, by a profile of it.

A part is the time of kernels, whether beside others or not: parts may add up to more than a step.
Without a GPU it is the time of operators on the host.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from megatron_fsdp_adapter.core.engine.grad_buffers import GradBuffers
from megatron_fsdp_adapter.core.engine.reduce import ReducePipeline
from megatron_fsdp_adapter.core.engine.reduction import Reduction
from megatron_fsdp_adapter.core.engine.weight_buffers import MainWeights

CASTS = "casts of weights"
GATHERS = "gathers"
COPIED_OUT = "copies of gathered weights"
COMPUTE = "forward and backward"
COPIED_IN = "copies of gradients"
REDUCTIONS = "reductions"
SCALED = "scales and sums"
NORM = "norm and clipping"
OPTIMIZER = "optimizer"
PARTS = (
    CASTS, GATHERS, COPIED_OUT, COMPUTE, COPIED_IN, REDUCTIONS, SCALED, NORM, OPTIMIZER,
)  # fmt: skip
"""In the order in which they are printed."""

MARK = "part: "
SCOPES: Mapping[str, str] = {
    "FSDP::all_gather_copy_out": COPIED_OUT,
    "FSDP::all_gather": CASTS,
    "FSDP::post_backward_reduce": COPIED_IN,
}
"""Names that torch's function gives ranges of its code, or how they begin: what its kernels do that
are no collectives."""

METHODS: tuple[tuple[type, str, str], ...] = (
    (MainWeights, "write_weights", CASTS),
    (GradBuffers, "take", COPIED_IN),
    (GradBuffers, "fill_bucket", COPIED_IN),
    (ReducePipeline, "_communicate", SCALED),
    (Reduction, "scale_segments", SCALED),
    (Reduction, "finish", SCALED),
    (Reduction, "add_partial", SCALED),
)
"""Methods of the engine: what their kernels do that are no collectives."""

COLLECTIVES: Mapping[str, str] = {
    "allgather": GATHERS,
    "all_gather": GATHERS,
    "reducescatter": REDUCTIONS,
    "reduce_scatter": REDUCTIONS,
    "sendrecv": REDUCTIONS,
    "alltoall": REDUCTIONS,
    "all_to_all": REDUCTIONS,
}
"""Parts of the names of collectives, in lower case."""


@contextmanager
def named(part: str) -> Iterator[None]:
    """Names the kernels that are launched inside."""
    with record_function(MARK + part):
        yield


def _naming(method: Callable[..., Any], part: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with named(part):
            return method(*args, **kwargs)

    return call


@contextmanager
def _engine_named() -> Iterator[None]:
    """Names the kernels of `METHODS`."""
    with ExitStack() as stack:
        for owner, name, part in METHODS:
            call = _naming(getattr(owner, name), part)
            stack.enter_context(mock.patch.object(owner, name, call))
        yield


def measured(step: Callable[[], None]) -> dict[str, float]:
    """Runs a step; returns milliseconds by part."""
    has_gpu = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU]
    if has_gpu:
        activities.append(ProfilerActivity.CUDA)
    with _engine_named(), profile(activities=activities) as found:
        step()
        if has_gpu:
            torch.cuda.synchronize()
    return split(found.events(), has_gpu)


def split(events: Iterable[Any], has_gpu: bool) -> dict[str, float]:
    """Milliseconds by part of the events of a profile."""
    total: Counter[str] = Counter()
    if has_gpu:
        for part, time in _parts_of_kernels(list(events)):
            total[part] += time
    else:
        for event in events:
            total[_part_on_host(event)] += event.self_cpu_time_total
    return {part: total[part] / 1000 for part in PARTS}


def _parts_of_kernels(events: Sequence[Any]) -> Iterator[tuple[str, float]]:
    """Part and microseconds of each kernel. It belongs to the innermost named range in which the
    host has launched it: the operator that the profiler knows of a Triton kernel is around that."""
    launches = {}
    ranges = []
    for event in events:
        if event.device_type != DeviceType.CPU:
            continue
        time = event.time_range
        if event.name.startswith("cu"):  # of CUDA's runtime or driver
            launches[event.id] = time.start
        part = _named_part(event.name)
        if part is not None:
            ranges.append((time.end - time.start, time.start, time.end, part))
    ranges.sort()  # the innermost of several is the shortest
    for event in events:
        if event.device_type == DeviceType.CPU or event.is_user_annotation:
            continue
        part = _collective(event.name)
        if part is None:
            part = COMPUTE
            launch = launches.get(event.id, -1.0)
            for _, start, end, named_part in ranges:
                if start <= launch <= end:
                    part = named_part
                    break
        yield part, event.time_range.end - event.time_range.start


def _collective(name: str) -> str | None:
    """The part of a collective of this name; None for what is none, or has no part of its own."""
    lower = name.lower()
    if "nccl" in lower or "c10d" in lower or "gloo" in lower:
        for word, part in COLLECTIVES.items():
            if word in lower:
                return part
    return None


def _named_part(name: str) -> str | None:
    """The part that a range of this name has; None if it names none."""
    if name.startswith(MARK):
        return name.removeprefix(MARK)
    for begin, part in SCOPES.items():
        if name.startswith(begin):
            return part
    return None


def _part_on_host(event: Any) -> str:
    """The part of an operator on the host."""
    part = _collective(event.name)
    above = event
    while part is None and above is not None:
        part = _named_part(above.name)
        above = above.cpu_parent
    return part or COMPUTE


def as_text(parts: Mapping[str, float]) -> str:
    """One line."""
    return ", ".join(f"{part} {time:.2f}" for part, time in parts.items())
