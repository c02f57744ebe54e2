"""What is done around an engine's construction."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from megatron_fsdp_adapter import fully_shard_model
from megatron_fsdp_adapter.build import building
from megatron_fsdp_adapter.build.materialize import device_of_type, materializer, own_initializer
from megatron_fsdp_adapter.core.engine.partition import (
    managed_params,
    partition,
    unit_modules,
)
from megatron_fsdp_adapter.core.runtime.device import HostRuntime
from megatron_fsdp_adapter.plain.mesh import device_type_of

CHECKS = ("build/building.py", "build/materialize.py", "plain/building.py", "plain/mesh.py")


def test_weights_are_read_when_every_stream_has_made_them(
    alone: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = mock.Mock(materializer=mock.Mock(wraps=building.materializer))
    monkeypatch.setattr(HostRuntime, "synchronize", order.synchronize)
    monkeypatch.setattr(building, "verify_same_model", order.verify_same_model)
    monkeypatch.setattr(building, "materializer", order.materializer)
    fully_shard_model(nn.Linear(4, 4))
    calls = [name for name, _, _ in order.mock_calls]
    assert calls[:3] == ["synchronize", "verify_same_model", "materializer"]


def test_where_shards_live(alone: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As under torch's `fully_shard`: with the mesh, or else on the accelerator."""
    on_host = nn.Linear(4, 4)
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda")
    )
    monkeypatch.setattr(
        torch, "get_device_module", lambda kind: SimpleNamespace(current_device=lambda: 3)
    )
    kinds = device_type_of(init_device_mesh("cpu", (1,))), device_type_of(None)
    assert kinds == ("cpu", "cuda")
    found = [str(device_of_type(on_host, kind)) for kind in kinds]
    assert found == ["cpu", "cuda:3"]


def test_parameters_of_a_unit_move_just_before_it_is_sharded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There is one device here, so that copies stand for moves."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    own = list(model.parameters())
    before = [param.data_ptr() for param in own]
    units = unit_modules(model, lambda child: isinstance(child, nn.Linear))
    plans = partition(units, managed_params(model, units))
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, device: tensor.clone())
    prepare = materializer(model, plans, torch.device("cuda", 0), own_initializer)
    for number, plan in enumerate(plans[:2]):
        prepare(plan)
        moved = [param.data_ptr() != at for param, at in zip(own, before, strict=True)]
        assert moved == [at < 2 * (number + 1) for at in range(4)]
    assert all(one is other for one, other in zip(model.parameters(), own, strict=True))
