"""The report of a failure raises nothing of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_fsdp_adapter import fully_shard_model
from megatron_fsdp_adapter.core.config import STRATEGIES
from megatron_fsdp_adapter.core.runtime import comm
from megatron_fsdp_adapter.diagnostics import fault_report
from megatron_fsdp_adapter.diagnostics.fault_report import CommunicationError
from megatron_fsdp_adapter.sharding import building
from tests.distributed.plain import Block, Net


@pytest.fixture
def two_fake_ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    monkeypatch.setitem(comm.CAPABILITIES, "fake", comm.Capabilities(True, True))
    monkeypatch.setattr(building, "verify_same_model", lambda *_: None)
    monkeypatch.setattr(fault_report, "timeout_of", lambda *_: 60.0)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_broadcast_that_fails_after_the_first_unit_is_named(
    two_fake_ranks: None, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    """Before: "data_ptr reads parameter ..., whose weights are not gathered", an error of the
    error's own, since looking for the name read parameters of units that were resharded."""
    carried: list[torch.Tensor] = []

    def broadcast(tensor: torch.Tensor, *_: Any, **__: Any) -> None:
        carried.append(tensor)
        if len(carried) == 15:  # the second parameter of the third block
            raise RuntimeError("Connection reset by peer")

    monkeypatch.setattr(dist, "broadcast", broadcast)
    with pytest.raises(CommunicationError) as caught:
        fully_shard_model(
            Net(), None, [Block, torch.nn.Embedding], data_parallel_sharding_strategy=strategy
        )
    text = str(caught.value)
    assert "broadcasting weights of parameter blocks.2.norm.bias of unit blocks.2 at" in text, text
    assert "Connection reset by peer" in text
