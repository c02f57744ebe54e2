"""The optimizer's step of a cell: all at once, or under the next forward."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from megatron_fsdp_adapter.sharding.first_unit import FirstUnitShards
from megatron_fsdp_adapter.sharding.late_optimizer import OPTION as LATE_STEP
from megatron_fsdp_adapter.sharding.late_optimizer import LateShards
from megatron_fsdp_adapter.sharding.memory import local_shards
from tests.distributed.topologies import TopologyTrainer

from .table import Cell


def ddp_step_options(cell: Cell) -> dict[str, bool]:
    return {LATE_STEP: True} if cell["step"] == "late" else {}


@contextlib.contextmanager
def stepped_as_asked(cell: Cell, trainer: TopologyTrainer) -> Iterator[None]:
    """Inside, the optimizer's step is what the cell says. AssertionError if none can be late."""
    if cell["step"] == "late":
        shards = local_shards(trainer.optimizer)
        assert shards, "nothing is updated here"
        if cell["graph"] == "on":  # a replay waits for no unit, but finds the first ones
            assert all(isinstance(one, FirstUnitShards) for one in shards), shards
        else:
            assert all(isinstance(one, LateShards) and one._may_be_late() for one in shards), shards
    yield
