"""Core's schedule that runs parts of layers (`overlap_moe_expert_parallel_comm`), of two microbatches
in turn: gradients like those of stock DDP under the same schedule."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch

from tests.distributed.checks import check_step
from tests.distributed.gpt import STRATEGIES
from tests.distributed.launch import run_ranks
from tests.distributed.topologies import (
    Topology,
    build_topology_trainer,
    case_for,
    init_topology,
    topology_step,
)

FIELDS = {"overlap_moe_expert_parallel_comm": True, "bf16": True}
EP2 = Topology("ep2", ep=2, experts=4)


@contextmanager
def host_tensors() -> Iterator[None]:
    """Tensors on the host are on no stream."""
    with mock.patch.object(torch.Tensor, "record_stream", lambda self, stream: None):
        yield


def _compare(rank: int, world: int, options: dict[str, Any], fields: dict[str, Any]) -> None:
    init_topology(EP2)
    case = case_for(EP2, bf16=True, adam_eps=1e-3, **options)
    fields = {**FIELDS, **fields}
    with host_tensors():
        reference = build_topology_trainer(EP2, case, None, fields=fields)
        ours = {
            strategy: build_topology_trainer(EP2, case, strategy, fields=fields)
            for strategy in STRATEGIES
        }
        for step in range(3):
            weights = reference.weights()
            theirs = topology_step(reference, step)
            for strategy, trainer in ours.items():
                trainer.load(weights)
                check_step(topology_step(trainer, step), theirs, f"{strategy}, step {step}")


@pytest.mark.parametrize("microbatches", (1, 3))
def test_each_step_is_that_of_stock_ddp(microbatches: int) -> None:
    run_ranks(_compare, 2, {"microbatches": microbatches}, {}, timeout=300)
