"""Cases of units that are kept, or are parts of layers, and the bytes that are gathered."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from megatron_fsdp_adapter.core.engine.buffer import FlatBuffer
from megatron_fsdp_adapter.core.engine.unit import Unit
from megatron_fsdp_adapter.plan.unsharded_budget import GIB
from tests.lib.gpt.checks import Step, check_numbers
from tests.lib.gpt.topologies import Topology, TopologyTrainer
from tests.lib.gpt.variants import Comparison

FINE = {"megatron_fsdp_enable_fine_grained_param_gather": True}
RECOMPUTED = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
EP2 = Topology("ep2", ep=2, experts=4)
KEPT_CASE = {"num_layers": 4, "bf16": True, "microbatches": 3, "positions": "learned_absolute"}
WEIGHTS_GIB = 39_200 / GIB
ALL_GIB = 1.0


def _near(ours: Step, reference: Step, label: str) -> None:
    check_numbers(ours, reference, label, 1e-3)


NEAR = Comparison(_near, _near)
EP2_CASE = {"bf16": True, "microbatches": 2}


@contextmanager
def gathered_bytes(trainer: TopologyTrainer) -> Iterator[list[int]]:
    """Inside, appends the bytes of gathered weights that there are each time memory is taken."""
    units = []
    for chunk in trainer.chunks:
        units.extend(chunk.engine.units)
    buffers = []
    for unit in units:
        for group in unit.groups:
            buffers.extend(group.weights.unsharded)
    found: list[int] = []
    allocate = FlatBuffer.allocate

    def counted(self: FlatBuffer) -> None:
        allocate(self)
        found.append(sum(buffer.nbytes for buffer in buffers if buffer.allocated))

    with mock.patch.object(FlatBuffer, "allocate", counted):
        yield found


def nbytes(unit: Unit) -> int:
    return sum(group.weights.nbytes for group in unit.groups)
