"""`fully_shard` with a `shard_placement_fn` that returns other dims than the first has the bits of
torch's function: placements, local tensors, gradients, norms, and what checkpoints have."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as theirs
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from megatron_fsdp_adapter import fully_shard as ours
from megatron_fsdp_adapter import fully_shard_optimizer
from megatron_fsdp_adapter.plain.fsdp2_model import engine_of
from tests.lib.gpt.checks import check_same_bits
from tests.lib.plain.beside_torch import TiedNet, check_alike, last_dim, trained
from tests.lib.plain.carried_over import carried_over
from tests.lib.plain.later_torch import ShardPlacementResult, joins_meshes
from tests.lib.ranks.shared_ranks import on_ranks

CHECKS = ("core/engine/extensions.py", "plain/call_problems.py", "plain/sharded_params.py")

WIDTH = 8
Shards = Callable[..., Any]


class Layer(nn.Module):
    """Weights of one, two and three dims."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 12)
        self.down = nn.Linear(12, WIDTH)
        self.mix = nn.Parameter(torch.randn(3, WIDTH, 4) / WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = torch.einsum("bd,edh->beh", x, self.mix).tanh().sum((1, 2))
        return x + self.down(torch.relu(self.up(self.norm(x)))) + mixed.view(-1, 1)


def made(shard: Shards, mesh: DeviceMesh, on_meta: bool = False, **options: Any) -> Any:
    torch.manual_seed(3)
    net = TiedNet(Layer, 2, WIDTH)
    values = net.state_dict()
    if on_meta:
        with torch.device("meta"):
            net = TiedNet(Layer, 2, WIDTH)
    options.setdefault("shard_placement_fn", last_dim)
    for module in (*net.layers, net):
        shard(module, mesh=mesh, **options)
    if on_meta:
        net.to_empty(device="cpu")
        for name, param in net.named_parameters():
            whole = distribute_tensor(values[name], mesh, param.placements, src_data_rank=None)
            param.detach().copy_(whole)
    return net


def train(
    net: Any, seed: int, microbatches: int = 1, first: int = 0
) -> tuple[torch.optim.Optimizer, list[float]]:
    """The optimizer, and all losses and norms."""

    def loss_of(step: int, microbatch: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(100 * step + 10 * microbatch + seed)
        return net(torch.randint(20, (6,), generator=generator)).square().mean()

    return trained(net, loss_of, microbatches, first)


BF16 = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
OPTIONS: tuple[tuple[dict[str, Any], int], ...] = (
    ({}, 1),
    ({}, 2),
    (BF16, 1),
    (BF16, 2),
    ({"reshard_after_forward": False}, 2),
    ({"on_meta": True}, 1),
    ({"offload_policy": CPUOffloadPolicy(pin_memory=False)}, 1),
)


@on_ranks(2)
def test_numbers_are_those_of_torchs_function(rank: int) -> None:
    for options, microbatches in OPTIONS:
        mesh = init_device_mesh("cpu", (2,))
        sides = [made(shard, mesh, **options) for shard in (theirs, ours)]
        expected, found = (train(side, rank, microbatches)[1] for side in sides)
        say = f"{options}, {microbatches=}"
        assert found == expected, say
        check_alike(sides[1], sides[0], say)


@on_ranks(2)
def test_a_checkpoint_of_either_goes_on_in_the_other(rank: int, root: Path) -> None:
    mesh = init_device_mesh("cpu", (2,))
    for number, (first, second) in enumerate(itertools.permutations((theirs, ours))):
        one, other = (made(shard, mesh) for shard in (first, second))
        optimizer, _ = train(one, rank)
        resumed = torch.optim.AdamW(other.parameters(), lr=1e-2)
        carried_over(one, optimizer, other, resumed, root / str(number))
        check_alike(other, one, "loaded")
        for param, like in zip(other.parameters(), one.parameters(), strict=True):
            for key in ("exp_avg", "exp_avg_sq"):
                local = resumed.state[param][key].to_local()
                check_same_bits({key: local}, {key: optimizer.state[like][key].to_local()}, key)


@on_ranks(2)
def test_what_a_program_does_to_such_parameters(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    net = made(ours, mesh)
    values = {name: value + 1 for name, value in TiedNet(Layer, 2, WIDTH).state_dict().items()}
    ids = torch.arange(6)
    for has_run in (False, True):
        net.load_state_dict(values)  # whole tensors
        for name, param in net.named_parameters():
            assert torch.equal(param.full_tensor(), values[name]), (name, has_run)
        net(ids).sum().backward()
        net.zero_grad()
    with pytest.raises(ValueError, match="of its parameters .*by another dim than the first"):
        fully_shard_optimizer(torch.optim.SGD(net.parameters(), lr=1e-2))

    def double(*_: Any) -> None:
        (weights,) = engine_of(net).units[0].joined
        sources = [buffer for param in weights.params for buffer in param._buffers]
        assert sources
        assert not any(buffer.allocated for buffer in sources)
        net.layers[0].mix.data.mul_(2)  # which is lost

    net.layers[0].norm.register_forward_hook(double)
    with pytest.raises(RuntimeError, match="layers.0.mix.*gathered weights were written"):
        net(ids)


@on_ranks(2)
def test_parts_that_are_not_equal_are_refused(rank: int) -> None:
    said = r"Shard\(-1\) for parameter weight, which has 5 elements along it: 2 ranks cannot"
    with pytest.raises(ValueError, match=said):
        ours(nn.Linear(5, 4), shard_placement_fn=last_dim)


def split_over_ranks(net: Any, mesh: DeviceMesh) -> None:
    """Tensor parallelism: `up` by rows of its weight, `down` by columns."""
    for layer in net.layers:
        parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def along(columns: bool) -> Callable[[nn.Parameter], Shard | None]:
    """Splits along the dim that tensor parallelism splits, or along the other one."""

    def place(param: Any) -> Shard | None:
        if param.ndim < 2 or not isinstance(param, DTensor):
            return None
        return Shard(param.placements[0].dim if columns else 1 - param.placements[0].dim)

    return place


@joins_meshes
@on_ranks(4)
def test_numbers_over_two_dims_of_ranks(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for columns, options in itertools.product((True, False), ({}, BF16)):
        found = []
        for shard in (theirs, ours):
            torch.manual_seed(3)
            net = TiedNet(Layer, 2, WIDTH)
            split_over_ranks(net, mesh["tp"])
            for module in (*net.layers, net):
                place = along(columns)
                shard(module, mesh=mesh["dp"], shard_placement_fn=place, **options)
            found.append((net, train(net, rank // 2)[1]))
        assert found[1][1] == found[0][1], (columns, options)
        check_alike(found[1][0], found[0][0], f"{columns=} {options}")
    replicas = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    sides = [made(shard, replicas) for shard in (theirs, ours)]
    expected, numbers = (train(side, rank, 2)[1] for side in sides)
    assert numbers == expected
    check_alike(sides[1], sides[0], "replicas")
    over = FSDPMeshInfo(mesh["tp"], shard_mesh_dim=0)

    def elsewhere(param: nn.Parameter) -> Any:
        return ShardPlacementResult(Shard(1), over) if param.ndim == 3 else last_dim(param)

    sides = [made(shard, mesh["dp"], shard_placement_fn=elsewhere) for shard in (theirs, ours)]
    expected, numbers = (train(side, 0)[1] for side in sides)
    assert numbers == expected
    check_alike(sides[1], sides[0], "another mesh")
    kept = init_device_mesh("cpu", (4,))
    sides = [
        made(shard, kept, reshard_after_forward=again)
        for shard, again in ((theirs, True), (ours, 2))
    ]
    expected, numbers = (train(side, rank)[1] for side in sides)
    assert numbers == expected
