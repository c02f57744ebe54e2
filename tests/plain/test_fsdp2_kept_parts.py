"""`reshard_after_forward=n`: weights are kept over n ranks between a forward and its backward.
Torch's function gives the expected numbers."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as theirs
from torch.utils.checkpoint import checkpoint

from megatron_fsdp_adapter import fully_shard as ours
from megatron_fsdp_adapter.core.engine.launches import FEWER, GATHERED
from megatron_fsdp_adapter.plain.fsdp2_model import engine_of
from tests.lib.plain.beside_torch import trained
from tests.lib.ranks.shared_ranks import on_ranks

CHECKS = (
    "core/engine/kept_parts.py",
    "core/engine/domain_gathers.py",
    "core/engine/gather.py",
    "plain/call_options.py",
)

WIDTH = 7
LAYERS = 3
KINDS = (FEWER, GATHERED)
BF16 = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}


class Layer(nn.Module):
    """No rank has as many rows as another."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 10)
        self.down = nn.Linear(10, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


class Net(nn.Module):
    def __init__(self, recomputes: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 3)
        self.recomputes = recomputes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recomputes else layer(x)
        return self.head(x)


def made(shard: Any, reshards: int, recomputes: bool = False, **options: Any) -> Any:
    torch.manual_seed(2)
    net = Net(recomputes)
    for layer in net.layers:
        shard(layer, reshard_after_forward=reshards, **options)
    shard(net, **options)
    for module in (*net.layers, net):
        module.set_force_sum_reduction_for_comms(True)  # gloo scales no sums
    return net


def batch(seed: int) -> torch.Tensor:
    return torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(seed))


def train(net: Any, rank: int, evaluates: bool = False) -> list[float]:
    """All losses and norms. Each of two backwards reduces. evaluates: before each forward, too."""
    evaluated = []

    def loss_of(step: int, microbatch: int) -> torch.Tensor:
        if evaluates:
            with torch.no_grad():
                evaluated.append(net(batch(1)).sum().item())
        return net(batch(100 * step + 10 * microbatch + rank)).square().mean()

    _, found = trained(net, loss_of, 2, keeps=False)
    return found + evaluated


@on_ranks(4)
def test_numbers_are_those_of_torchs_function(rank: int) -> None:
    mesh = init_device_mesh("cpu", (4,))
    for options in ({}, BF16, {"recomputes": True}):
        expected, found = (
            train(made(one, 2, mesh=mesh, **options), rank) for one in (theirs, ours)
        )
        assert found == expected, options
    plain = train(made(ours, 2, mesh=mesh), rank, evaluates=True)
    assert plain == train(made(ours, True, mesh=mesh), rank, evaluates=True)


@on_ranks(4)
def test_a_part_is_kept_until_the_backward(rank: int) -> None:
    mesh = DeviceMesh.from_group(dist.new_group(range(4)), "cpu")
    with mock.patch.object(dist, "new_group", wraps=dist.new_group) as new_group:
        net = made(ours, 2, mesh=mesh)
    assert new_group.call_count == 2  # once for all layers: two neighbors, and two others
    engine = engine_of(net)
    first, second, last = engine.units[:LAYERS]
    out = net(batch(rank))
    engine.runtime.synchronize()
    for unit in (first, second):
        assert unit.parts.is_kept
        pairs = [pair for group in unit.groups for pair in group.weights.gather_pairs]
        assert unit.parts.nbytes == sum(whole.nbytes for whole, _ in pairs) // 2
        assert not any(full.allocated for group in unit.groups for full in group.weights.unsharded)
    assert not last.parts.is_kept  # its backward comes next, so it stays gathered
    out.square().mean().backward()
    engine.runtime.synchronize()
    launches = engine.launches.log
    fewer, gathered = (
        [kind.format(unit.groups[0].name) for unit in (first, second)] for kind in KINDS
    )
    launched = [*launches.before.latest, *launches.launched.latest]
    found = [text for text in launched if text in fewer + gathered]
    assert found == [*gathered, *reversed(fewer)]
    assert [unit.parts.nbytes for unit in (first, second)] == [0, 0]

    net(batch(rank))  # what it leaves goes with the next forward, or when weights are written
    assert first.parts.is_kept
    torch.optim.SGD(net.parameters(), lr=0.1).step()
    net.layers[0].set_reshard_after_forward(True)
    out = net(batch(rank))
    assert first.parts is None
    assert second.parts.is_kept
    out.sum().backward()


@on_ranks(2)
def test_numbers_of_ranks(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    engines = [engine_of(made(ours, number, mesh=mesh)) for number in (2, True, 1, False)]
    kept = [engine.units[0].strategy.shard_weights for engine in engines]
    assert kept == [True, True, False, False]
    assert not any(engine.units[0].parts for engine in engines)
    for wrong in (3, 0, "2"):
        with pytest.raises(ValueError, match="reshard_after_forward=.*divides the 2 ranks"):
            ours(Layer(), mesh=mesh, reshard_after_forward=wrong)
