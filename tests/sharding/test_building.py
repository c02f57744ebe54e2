"""What is done around an engine's construction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

from megatron_fsdp_adapter import fully_shard_model
from megatron_fsdp_adapter.core.runtime.device import HostRuntime
from megatron_fsdp_adapter.sharding import building


def test_weights_are_read_when_every_stream_has_made_them(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def noted(what: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*arguments: Any) -> Any:
            order.append(what)
            return function(*arguments)

        return called

    materializer = building.materializer
    monkeypatch.setattr(HostRuntime, "synchronize", noted("waited", HostRuntime.synchronize))
    monkeypatch.setattr(
        building, "verify_same_model", noted("compared", building.verify_same_model)
    )
    monkeypatch.setattr(
        building, "materializer", lambda *arguments: noted("read", materializer(*arguments))
    )
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        fully_shard_model(nn.Linear(4, 4))
    finally:
        dist.destroy_process_group()
    assert order[:3] == ["waited", "compared", "read"]
