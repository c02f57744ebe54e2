"""Splits a step of `fully_shard`, this package's or torch's, into parts, by a profile of it.

A part is the time of kernels, whether beside others or not: parts may add up to more than a step.
Without a GPU it is the time of operators on the host.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
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
    for event in events:
        if has_gpu:
            for kernel in event.kernels:
                total[_part(event, kernel.name)] += kernel.duration
        else:
            total[_part(event, event.name)] += event.self_cpu_time_total
    return {part: total[part] / 1000 for part in PARTS}


def _part(event: Any, kernel: str) -> str:
    """The part of a kernel that an event has launched."""
    name = kernel.lower()
    if "nccl" in name or "c10d" in name or "gloo" in name:
        for word, part in COLLECTIVES.items():
            if word in name:
                return part
    above = event
    while above is not None:
        if above.name.startswith(MARK):
            return above.name.removeprefix(MARK)
        for begin, part in SCOPES.items():
            if above.name.startswith(begin):
                return part
        above = above.cpu_parent
    return COMPUTE


def as_text(parts: Mapping[str, float]) -> str:
    """One line."""
    return ", ".join(f"{part} {time:.2f}" for part, time in parts.items())
