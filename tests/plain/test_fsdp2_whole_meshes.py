"""`fully_shard` of parameters over a whole mesh, of which `dp_mesh_dims` names the dims for data
parallelism, gives the bits of torch's function."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as theirs
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from megatron_fsdp_adapter import fully_shard as ours
from tests.lib.plain.beside_torch import check_alike, trained
from tests.lib.plain.carried_over import carried_over
from tests.lib.plain.later_torch import DataParallelMeshDims as Dims
from tests.lib.plain.later_torch import joins_meshes
from tests.lib.ranks.shared_ranks import on_ranks

CHECKS = ("plain/mesh.py", "plain/sharded_params.py", "core/engine/tensor_parallel.py")

WIDTH = 6
if Dims is None:
    pytest.skip("needs torch 2.12", allow_module_level=True)
SPLIT = {"0.0.weight": Shard(0), "0.0.bias": Shard(0), "0.2.weight": Shard(1)}
"""Placements over `tp`; others are replicated."""
BF16 = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}


def made(shard: Callable[..., Any], mesh: DeviceMesh, dims: Any, **options: Any) -> Any:
    torch.manual_seed(5)
    first = nn.Sequential(nn.Linear(WIDTH, 10), nn.ReLU(), nn.Linear(10, WIDTH))
    net = nn.Sequential(first, nn.Linear(WIDTH, 4))
    for name, param in list(net.named_parameters()):
        owner, _, own = name.rpartition(".")
        places: list[Placement] = []
        for dim in mesh.mesh_dim_names or ():
            places.append(SPLIT.get(name, Replicate()) if dim == "tp" else Replicate())
        whole = nn.Parameter(distribute_tensor(param.detach(), mesh, places))
        net.get_submodule(owner).register_parameter(own, whole)
    for module in (first, net):
        shard(module, mesh=mesh, dp_mesh_dims=dims, **options)
    for module in (first, net):
        module.set_force_sum_reduction_for_comms(True)  # gloo scales no sums
    return net


def train(
    net: Any, mesh: DeviceMesh, own: set[str], microbatches: int
) -> tuple[torch.optim.Optimizer, list[float]]:
    """The optimizer, and all losses and norms. own: the dims over which the batch is split."""
    places = [Shard(0) if dim in own else Replicate() for dim in mesh.mesh_dim_names or ()]

    def loss_of(step: int, microbatch: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(10 * step + microbatch)
        batch = torch.randn(8, WIDTH, generator=generator)
        return net(distribute_tensor(batch, mesh, places)).square().mean()

    return trained(net, loss_of, microbatches)


CASES: tuple[tuple[tuple[int, ...], str, Any, dict[str, Any], int], ...] = (
    ((2, 2), "dp1 tp", Dims("dp1"), {}, 2),
    ((2, 2), "tp dp2", Dims("dp2"), {}, 1),
    ((2, 2), "r3 dp3", Dims("dp3", "r3"), {}, 1),
    ((1, 2, 2), "dp4 cp tp", Dims(("dp4", "cp")), {}, 1),
    ((2, 1, 1, 2), "r5 dp5 cp tp", Dims(("dp5", "cp"), "r5"), {}, 1),
    ((2, 2), "dp6 tp", Dims("dp6"), BF16, 1),
    ((2, 2), "dp7 tp", Dims("dp7"), {"reshard_after_forward": False}, 1),
)
"""Sizes and names of the mesh's dims, those for data parallelism, options, microbatches.

Torch wants each mesh to be one object, but its caches return an earlier one of the same names."""


@joins_meshes
@on_ranks(4)
def test_numbers_are_those_of_torchs_function(rank: int) -> None:
    for sizes, names, dims, options, microbatches in CASES:
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=tuple(names.split()))
        own = {*dims.shard_names, *dims.replicate_names}
        nets = [made(shard, mesh, dims, **options) for shard in (theirs, ours)]
        expected, found = (train(net, mesh, own, microbatches)[1] for net in nets)
        assert found == expected, names
        check_alike(nets[1], nets[0])


@joins_meshes
@on_ranks(4)
def test_replaced_parameters_and_checkpoints(rank: int, root: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp8", "tp"))
    one, other = (made(shard, mesh, Dims("dp8")) for shard in (ours, theirs))
    optimizer, _ = train(one, mesh, {"dp8"}, 1)
    resumed = torch.optim.AdamW(other.parameters(), lr=1e-2)
    carried_over(one, optimizer, other, resumed, root / "saved")
    check_alike(one, other)
    third = made(ours, mesh, Dims("dp8"))
    for module in third.modules():
        for name, param in list(module.named_parameters(recurse=False)):
            module.register_parameter(name, nn.Parameter(param.detach().clone()))
    expected = train(made(theirs, mesh, Dims("dp8")), mesh, {"dp8"}, 1)[1]
    assert train(third, mesh, {"dp8"}, 1)[1] == expected


@on_ranks(4)
def test_parameters_that_are_none_are_refused(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with pytest.raises(ValueError, match="weight.*it is no DTensor.*leaves out .'tp'.*Make it one"):
        ours(nn.Linear(2, 2), mesh=mesh, dp_mesh_dims=Dims("dp"))
    info = type("Info", (), {"spmd_mesh": mesh, "dp_mesh_dims": Dims("dp"), "mesh": mesh["dp"]})
    info.shard_process_group = mesh["dp"].get_group()
    placed = type("Placed", (), {"placement": None, "mesh_info": info})
    with pytest.raises(ValueError, match="it is no DTensor"):
        ours(nn.Linear(2, 2), shard_placement_fn=lambda param: placed)
    with pytest.raises(ValueError, match=r"has no dims \['cp'\].*Name some of"):
        ours(nn.Linear(2, 2), mesh=mesh, dp_mesh_dims=Dims("cp"))
    split = nn.Linear(2, 2, bias=False)
    over = distribute_tensor(split.weight.detach(), mesh, [Shard(0), Replicate()])
    split.weight = nn.Parameter(over)
    with pytest.raises(ValueError, match="over 'dp', a dim for data.*Make it Replicate"):
        ours(split, mesh=mesh, dp_mesh_dims=Dims("dp"))
