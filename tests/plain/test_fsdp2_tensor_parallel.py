"""`fully_shard` of modules whose parameters are DTensors over ranks of tensor parallelism gives the
bits of torch's function: losses, norms, weights, and what checkpoints have."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as theirs
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from megatron_fsdp_adapter import fully_shard as ours
from megatron_fsdp_adapter import fully_shard_optimizer
from megatron_fsdp_adapter.plain.fsdp2_model import engine_of
from tests.lib.gpt.checks import check_same_bits
from tests.lib.plain.beside_torch import check_alike, trained
from tests.lib.plain.carried_over import carried_over
from tests.lib.ranks.shared_ranks import on_ranks

CHECKS = ("core/engine/tensor_parallel.py", "plain/fsdp2.py", "plain/fsdp2_model.py")

WIDTH = 10
MICROBATCHES = 2
Shards = Callable[..., Any]


class Layer(nn.Module):
    """Its rows divide neither by the ranks of data parallelism nor by all."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 18)
        self.down = nn.Linear(18, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.out = nn.Linear(WIDTH, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


def sequence_parallel(net: nn.Module, mesh: DeviceMesh) -> None:
    """Splits weights by columns and rows, and activations along the sequence."""
    along = Shard(1)
    for layer in net.layers:
        plan = {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=along),
            "down": RowwiseParallel(output_layouts=along, use_local_output=False),
        }
        parallelize_module(layer, mesh, plan)
    enter = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=along)
    leave = ColwiseParallel(input_layouts=along, output_layouts=Replicate())
    parallelize_module(net, mesh, {"layers.0": enter, "out": leave})


def made(
    shard: Shards, dp: DeviceMesh, tp: DeviceMesh, on_meta: bool = False, **options: Any
) -> Any:
    torch.manual_seed(3)
    net = Net()
    values = net.state_dict()
    if on_meta:
        with torch.device("meta"):
            net = Net()
    sequence_parallel(net, tp)
    for module in (*net.layers, net):
        shard(module, mesh=dp, **options)
    if on_meta:
        net.to_empty(device="cpu")
        for name, param in net.named_parameters():
            *_, placement = param.placements
            own = distribute_tensor(values[name], tp, [placement], src_data_rank=None).to_local()
            rows = own.chunk(dp.size())[dp.get_local_rank()]
            param.to_local().detach().copy_(rows)
    return net


def train(
    net: Any, seed: int, accumulate: bool = False, first: int = 0
) -> tuple[torch.optim.Optimizer, list[float]]:
    """The optimizer, and all losses and norms."""

    def loss_of(step: int, microbatch: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(100 * step + 10 * microbatch + seed)
        return net(torch.randn(3, 8, WIDTH, generator=generator)).square().mean()

    return trained(net, loss_of, MICROBATCHES if accumulate else 1, first)


BF16 = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
OPTIONS: tuple[tuple[dict[str, Any], bool], ...] = (
    ({}, False),
    ({}, True),
    (BF16, False),  # torch sums accumulated gradients of several dtypes in another order
    ({"reshard_after_forward": False}, True),
    ({"on_meta": True}, False),
)


@on_ranks(4)
def test_numbers_are_those_of_torchs_function(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    replicas = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicas", "shards", "tp"))
    meshes = [(mesh["dp"], mesh["tp"], row) for row in OPTIONS]
    meshes.append((replicas["replicas", "shards"], replicas["tp"], ({}, False)))
    for dp, tp, (options, accumulate) in meshes:
        sides = [made(shard, dp, tp, **options) for shard in (theirs, ours)]
        seed = rank // 2
        expected, found = (train(side, seed, accumulate)[1] for side in sides)
        say = f"{dp}, {options}, {accumulate=}"
        assert found == expected, say
        check_alike(sides[1], sides[0], say)


@on_ranks(4)
def test_a_checkpoint_of_either_goes_on_in_the_other(rank: int, root: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for number, (first, second) in enumerate(itertools.permutations((theirs, ours))):
        folder = root / str(number)
        one, other = (made(shard, mesh["dp"], mesh["tp"]) for shard in (first, second))
        optimizer, _ = train(one, rank // 2)
        resumed = torch.optim.AdamW(other.parameters(), lr=1e-2)
        carried_over(one, optimizer, other, resumed, folder)
        check_alike(other, one, "loaded")
        for param, like in zip(other.parameters(), one.parameters(), strict=True):
            for key, value in optimizer.state[like].items():
                found = resumed.state[param][key]
                local = getattr(found, "_local_tensor", found)
                check_same_bits({key: local}, {key: getattr(value, "_local_tensor", value)}, key)


@on_ranks(4)
def test_what_a_program_does_to_such_parameters(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    net = made(ours, mesh["dp"], mesh["tp"])
    with pytest.raises(ValueError, match=r"13 of its parameters .*Use the optimizer as it is"):
        fully_shard_optimizer(torch.optim.SGD(net.parameters(), lr=1e-2))
    frozen = dict(net.named_parameters())["layers.0.up.weight"]
    frozen.requires_grad_(False)
    before = frozen.full_tensor().clone()
    train(net, rank // 2)
    assert frozen.grad is None
    assert torch.equal(frozen.full_tensor(), before)
    frozen.requires_grad_(True)
    train(net, rank // 2, first=5)
    assert not torch.equal(frozen.full_tensor(), before)
    pairs = engine_of(net).pairs
    given = next(pair.unsharded for pair in pairs if pair.sharded is frozen)
    with pytest.raises(RuntimeError, match=r"full_tensor reads .*layers.0.up.weight"):
        given.full_tensor()
    with pytest.raises(RuntimeError, match=r"layers.0.up.weight.* not gathered"):
        given + 1
    # A layer that is not called shows the sharded weight.
    shown = []
    net.layers[1].register_forward_hook(lambda *_: shown.append(net.layers[0].up.weight))
    net(torch.randn(3, 8, WIDTH))
    assert shown[0] is frozen


@on_ranks(4)
def test_dtensors_that_cannot_be_sharded_are_refused_by_name(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    other = init_device_mesh("cpu", (4,), mesh_dim_names=("ep",))
    for over, placement, dp, match in (
        (mesh["tp"], Replicate(), None, r"weight .*Pass the data-parallel mesh"),
        (mesh["dp"], Replicate(), mesh["dp"], r"weight .*over which it is to be sharded"),
        (other, Replicate(), mesh["dp"], r"weight .*of one init_device_mesh"),
        (mesh["tp"], Partial(), mesh["dp"], r"weight .*Use Shard or Replicate"),
    ):
        module = nn.Linear(4, 4, bias=False)
        value = DTensor.from_local(torch.zeros(4, 4), over, [placement], run_check=False)
        module.weight = nn.Parameter(value)
        with pytest.raises(ValueError, match=match):
            ours(module, mesh=dp)
    dist.barrier()
