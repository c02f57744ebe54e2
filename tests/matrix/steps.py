"""The optimizer's step of a cell: all at once, under the next forward, or in a CUDA graph."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from megatron_fsdp_adapter.megatron.seams import core_api
from megatron_fsdp_adapter.megatron.step_graphs import OPTION as STEP_GRAPH
from megatron_fsdp_adapter.sharding.first_unit import FirstUnitShards
from megatron_fsdp_adapter.sharding.late_optimizer import OPTION as LATE_STEP
from megatron_fsdp_adapter.sharding.late_optimizer import LateShards
from megatron_fsdp_adapter.sharding.memory import local_shards
from tests.distributed.topologies import TopologyTrainer

from .table import Cell


def is_captured(cell: Cell) -> bool:
    return cell["step"] == "graph" and core_api.STEP_GRAPHS is not None


def ddp_step_options(cell: Cell) -> dict[str, bool]:
    return {LATE_STEP: True} if cell["step"] == "late" else {}


def optimizer_step_options(cell: Cell) -> dict[str, bool]:
    return {STEP_GRAPH: True} if is_captured(cell) else {}


def set_learning_rate(group: dict[str, Any], rate: float) -> None:
    """As core's scheduler does: a tensor is filled."""
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


@contextlib.contextmanager
def stepped_as_asked(cell: Cell, trainer: TopologyTrainer, warmup: int) -> Iterator[None]:
    """Inside, the optimizer's step is what the cell says. AssertionError if none was captured, or
    none can be late. warmup: steps before the one that is captured.
    The graph stays with core's wrapper of it."""
    if cell["step"] == "late":
        shards = local_shards(trainer.optimizer)
        assert shards, "nothing is updated here"
        if cell["graph"] == "on":  # a replay waits for no unit, but finds the first ones
            assert all(isinstance(one, FirstUnitShards) for one in shards), shards
        else:
            assert all(isinstance(one, LateShards) and one._may_be_late() for one in shards), shards
    if not is_captured(cell):
        yield
        return
    wrapper = core_api.STEP_GRAPHS
    trainer.optimizer.step = wrapper(trainer.optimizer.step, cuda_graph_warmup_steps=warmup)
    try:
        yield
        assert wrapper.cuda_graph is not None, "no step was captured"
    finally:
        del trainer.optimizer.step
