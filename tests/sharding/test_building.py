"""What is done around an engine's construction."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp_adapter import fully_shard_model
from megatron_fsdp_adapter.core.runtime.device import HostRuntime
from megatron_fsdp_adapter.sharding import building


def test_weights_are_read_when_every_stream_has_made_them(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    class Waited(HostRuntime):
        def synchronize(self) -> None:
            order.append("waited")
            super().synchronize()

    compare, materializer = building.verify_same_model, building.Materializer

    def compared(*arguments: object) -> None:
        order.append("compared")
        compare(*arguments)

    def reading(*arguments: object) -> object:
        give_values = materializer(*arguments)

        def read(plan: object) -> None:
            order.append("read")
            give_values(plan)

        return read

    monkeypatch.setattr(building, "make_runtime", Waited)
    monkeypatch.setattr(building, "verify_same_model", compared)
    monkeypatch.setattr(building, "Materializer", reading)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        fully_shard_model(nn.Linear(4, 4, device=torch.device("cpu")))
    finally:
        dist.destroy_process_group()
    assert order[:3] == ["waited", "compared", "read"]
