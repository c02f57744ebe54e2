"""Parameters of one model over several sets of ranks, as experts of torchtitan and of transformers
are: those of experts are split over ranks of expert parallelism already, and are sharded over the
ranks that have the same ones. Torch's own `fully_shard` gives the expected numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as theirs
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from megatron_fsdp_adapter import fully_shard as ours
from tests.lib.plain.beside_torch import check_alike, trained
from tests.lib.plain.carried_over import carried_over
from tests.lib.plain.later_torch import ShardPlacementResult, has_places, joins_meshes
from tests.lib.ranks.shared_ranks import on_ranks

CHECKS = ("plain/fsdp2.py", "plain/call_options.py")

WIDTH = 6
EXPERTS = 4


class Experts(nn.Module):
    """Each rank computes with its own experts."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) / WIDTH)
        self.down = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) / WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up, down = (w.to_local() if isinstance(w, DTensor) else w for w in (self.up, self.down))
        return (torch.einsum("bd,edh->ebh", x, up).tanh() @ down).sum(0)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, WIDTH)
        self.experts = Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + self.router(y).sigmoid() * self.experts(y)


def meshes() -> tuple[DeviceMesh, DeviceMesh, DeviceMesh]:
    """All ranks; those with the same experts; those that have all experts together."""
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
    return init_device_mesh("cpu", (4,), mesh_dim_names=("fsdp",)), both["efsdp"], both["ep"]


def _by_calls(block: Any, shard: Any, dense: DeviceMesh, same: DeviceMesh, **options: Any) -> None:
    """As torchtitan 0.3."""
    shard(block.experts, mesh=same, shard_placement_fn=lambda param: Shard(0), **options)
    block.experts.set_gradient_divide_factor(4.0)
    shard(block, mesh=dense, **options)


def _by_result(block: Any, shard: Any, dense: DeviceMesh, same: DeviceMesh, **options: Any) -> None:
    """By a function that gives the parameters of experts their mesh, in one call."""
    experts = {id(param) for param in block.experts.parameters()}
    over = FSDPMeshInfo(same, shard_mesh_dim=0)

    def place(param: nn.Parameter) -> Any:
        return ShardPlacementResult(Shard(0), over) if id(param) in experts else None

    shard(block, mesh=dense, shard_placement_fn=place, **options)


Sharded = Callable[..., None]


def made(shard: Any, sharded: Sharded, splits: bool, **options: Any) -> Any:
    """A model of two blocks. splits: experts are split over ranks before they are sharded."""
    torch.manual_seed(11)
    net = nn.Sequential(Block(), Block())
    dense, same, parallel = meshes()
    for block in net:
        for name, param in list(block.experts.named_parameters()) if splits else ():
            whole = distribute_tensor(param.detach(), parallel, [Shard(0)])
            block.experts.register_parameter(name, nn.Parameter(whole))
        sharded(block, shard, dense, same, **options)
    shard(net, mesh=dense, **options)
    for module in net.modules():
        if hasattr(module, "set_force_sum_reduction_for_comms"):
            module.set_force_sum_reduction_for_comms(True)  # gloo scales no sums
    return net


def train(net: Any, rank: int) -> tuple[torch.optim.Optimizer, list[float]]:
    """The optimizer, and all losses. Each of two backwards reduces."""

    def loss_of(step: int, microbatch: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(100 * step + 10 * microbatch + rank)
        return net(torch.randn(5, WIDTH, generator=generator)).square().mean()

    return trained(net, loss_of, 2, keeps=False, norms=lambda net: (), foreach=False)


BF16 = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}


@pytest.mark.parametrize(
    ("sharded", "splits", "options"),
    [
        pytest.param(_by_calls, True, {}, marks=joins_meshes),
        pytest.param(_by_calls, True, {"reshard_after_forward": False}, marks=joins_meshes),
        pytest.param(_by_calls, True, BF16, marks=joins_meshes),
        pytest.param(_by_result, True, {}, marks=joins_meshes),
        (_by_calls, False, {}),
        pytest.param(_by_result, False, {}, marks=has_places),
    ],
)  # fmt: skip
@on_ranks(4)
def test_experts_over_ranks_of_their_own(
    rank: int, sharded: Sharded, splits: bool, options: dict[str, Any]
) -> None:
    one, other = (made(shard, sharded, splits, **options) for shard in (theirs, ours))
    expected, found = (train(net, rank)[1] for net in (one, other))
    assert found == expected
    check_alike(other, one)


@joins_meshes
@on_ranks(4)
def test_experts_that_are_split_over_two_dims(rank: int) -> None:
    """Expert and tensor parallelism; one rank has each part."""
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("efsdp", "ep", "tp"))
    nets = []
    for shard in (theirs, ours):
        torch.manual_seed(11)
        net = nn.Sequential(Experts(), nn.Linear(WIDTH, WIDTH))
        places = {"up": [Shard(0), Shard(2)], "down": [Shard(0), Shard(1)]}
        for name, place in places.items():
            whole = distribute_tensor(getattr(net[0], name).detach(), mesh["ep", "tp"], place)
            net[0].register_parameter(name, nn.Parameter(whole))
        shard(net[0], mesh=mesh["efsdp"])
        nets.append(shard(net, mesh=meshes()[0]))
    expected, found = (train(net, rank)[1] for net in nets)
    assert found == expected
    check_alike(*nets)


@joins_meshes
@on_ranks(4)
def test_a_checkpoint_of_such_a_model(rank: int, root: Any) -> None:
    one, other = (made(shard, _by_calls, True) for shard in (ours, theirs))
    optimizer, _ = train(one, rank)
    resumed = torch.optim.AdamW(other.parameters(), lr=1e-2, foreach=False)
    carried_over(one, optimizer, other, resumed, root / "saved")
    check_alike(one, other)
