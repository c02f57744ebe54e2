"""Running out of memory names the buffer, its unit, and what the strategy takes of this rank."""

from __future__ import annotations

import ctypes
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from megatron_fsdp_adapter import fully_shard_model
from megatron_fsdp_adapter.core.config import STRATEGIES, EngineConfig
from megatron_fsdp_adapter.core.engine.buffer import FlatBuffer
from megatron_fsdp_adapter.core.engine.partition import ROOT
from megatron_fsdp_adapter.core.layout import ParamSpec, plan_group
from megatron_fsdp_adapter.diagnostics.fault_report import memory_plan
from tests.distributed.launch import run_ranks

WIDTH = 2048
"""A weight of this width squared has 16 MiB, more than the room that is left."""
M_MMAP_THRESHOLD = -3
"""Of glibc's malloc.h."""


@contextmanager
def little_room(mebibytes: int) -> Iterator[None]:
    """Inside, the process may map that much more than it has."""
    with open("/proc/self/statm") as file:
        mapped = int(file.read().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (mapped + mebibytes * 2**20, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2))


def _fails(run: Any, *said: str, mebibytes: int = 8) -> None:
    with little_room(mebibytes), pytest.raises(RuntimeError) as caught:
        run()
    for text in (*said, "can't allocate memory", "optim_grads", "main weights: 0.016 GiB",
                 "optimizer state: 0.031", "together: 0.", "fsdp_unit_modules"):  # fmt: skip
        assert text in str(caught.value), (text, str(caught.value))


def _give_back_at_once() -> None:
    """From now on the C library keeps nothing of 1 MiB or more that was freed, whose reuse no limit
    would see: by default it learns to, from the first large block on."""
    assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 20) == 1


def _runs_out(rank: int, world: int) -> None:
    _give_back_at_once()
    model = fully_shard_model(_model(), fsdp_unit_modules=[nn.Linear])
    x = torch.ones(3, 4)
    _fails(lambda: model(x), "rank 0: no memory for the gathered weights of unit 1 (0.016 GiB")
    _trains_on(model, x)
    model = fully_shard_model(
        _model().bfloat16(), fsdp_unit_modules=[nn.Linear],
        data_parallel_sharding_strategy="optim_grads",
    )  # fmt: skip
    loss = model(x.bfloat16()).sum()
    said = "rank 0: no memory for the reduce bucket of unit 1 (0.016 GiB"
    _fails(loss.backward, said, mebibytes=20)  # the weight gradient, of 8 MiB, comes first
    _trains_on(model, x.bfloat16())
    again = _model()
    _fails(
        lambda: fully_shard_model(again, fsdp_unit_modules=[nn.Linear]),
        "no memory for the buffers of unit 1 at construction",
    )


def _trains_on(model: nn.Module, x: torch.Tensor) -> None:
    """After a failure of either kind the next step runs."""
    model.zero_grad()
    model(x).sum().backward()
    assert all(param.grad is not None for param in model.parameters())


def test_the_message_names_buffer_unit_and_plan() -> None:
    """With a real limit of the operating system: in forward, in backward, at construction."""
    run_ranks(_runs_out, 1)


def test_the_plan_of_slots() -> None:
    """Layers alternate between two slots, the last unit (the root) has its own; the largest bucket
    fits into the room for pieces."""
    layouts = [
        plan_group([ParamSpec(0, ("weight",), (rows, 64), torch.bfloat16, True, 64)], 2)
        for rows in (128, 64, 128, 64)
    ]
    names = ("1", "2", "3", ROOT)
    units = {name: [(one, 0, False)] for name, one in zip(names, layouts, strict=True)}
    row = STRATEGIES["optim_grads_params"]
    slots = {"weight_slots": True, "bucket_slots": True, "all_to_all_gradients": True}
    kinds = ["Linear"] * 3 + ["Sequential"]
    plan = memory_plan(units, EngineConfig(row, **slots), kinds)
    big, small = 128 * 64, 64 * 64
    for line in (f"weight slots: {2 * (2 * big + small)} bytes",
                 f"bucket slots: {4 * (2 * big + small)} bytes",
                 f"received pieces: {4 * big} bytes"):  # fmt: skip
        assert line in plan, plan
    assert not any("slots" in line for line in memory_plan(units, EngineConfig(row), kinds))


def _another_error(rank: int, world: int) -> None:
    model = fully_shard_model(nn.Linear(3, 3))
    [group] = model.engine.groups
    with pytest.raises(RuntimeError, match="something else"):
        model.engine.runtime.on_out_of_memory("weights", group.weights[0].tensor, RuntimeError("x"))
        raise RuntimeError("something else")
    assert isinstance(group.weights[0], FlatBuffer)


def test_other_errors_are_left_as_they_are() -> None:
    run_ranks(_another_error, 1)
