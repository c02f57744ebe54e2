"""Gradients that core adds up over tensor-parallel ranks are added in the dtype of main gradients,
whatever dtype the data-parallel reduction has on the wire."""

from __future__ import annotations

import importlib
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core import parallel_state as ps

from tests.distributed.gpt import STRATEGIES
from tests.distributed.groups import everyones
from tests.distributed.shared_ranks import on_ranks
from tests.distributed.topologies import (
    TOPOLOGIES,
    build_topology_trainer,
    case_for,
    init_topology,
    run_schedule,
)

core_finalize = importlib.import_module("megatron.core.distributed.finalize_model_grads")
"""The module, of which a function has the name."""

TOPOLOGY = TOPOLOGIES["tp2-sp"]
IN_BF16 = {"megatron_fsdp_grad_comm_dtype": torch.bfloat16}
"""Float32 main gradients, bf16 on the wire."""


def _marked(trainer: Any) -> list[torch.Tensor]:
    """Local gradients of what sequence-parallel ranks hold alike."""
    return [
        param.grad._local_tensor
        for param in trainer.chunks[0].parameters()
        if getattr(param, "sequence_parallel", False)
    ]


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_sums_over_tensor_parallel_ranks_are_in_the_dtype_of_main_gradients(strategy: str) -> None:
    """Bit for bit: the reduction over the data-parallel axis alone is in bf16."""
    init_topology(TOPOLOGY)
    case = case_for(TOPOLOGY, microbatches=3)
    trainer = build_topology_trainer(TOPOLOGY, case, strategy, ddp=IN_BF16)
    name, before = "_allreduce_non_tensor_model_parallel_grads", []
    original = getattr(core_finalize, name)

    def recording(*args: Any, **kwargs: Any) -> None:
        before.extend(grad.clone() for grad in _marked(trainer))
        original(*args, **kwargs)

    with mock.patch.object(core_finalize, name, recording):
        run_schedule(trainer, 0)
    after = _marked(trainer)
    assert len(after) == len(before) > 0
    assert any(grad.numel() for grad in before), "this rank has a part of them"
    pieces = everyones(before, ps.get_tensor_model_parallel_group())
    for index, found in enumerate(after):
        assert found.dtype == torch.float32, found.dtype
        assert torch.equal(found, sum(piece[index] for piece in pieces)), "the sum is another one"
    lossy = [grad for grad in after if not torch.equal(grad.bfloat16().float(), grad)]
    assert lossy, "a sum in bf16 would have been the same"
