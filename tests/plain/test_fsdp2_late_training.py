"""Parameters that are frozen when the model first runs, and trained later: losses, norms and
weights of `fully_shard` are those of torch's function, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as theirs
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from megatron_fsdp_adapter import fully_shard as ours
from megatron_fsdp_adapter.plain.fsdp2_model import engine_of
from tests.lib.plain.beside_torch import NormedLayer, TiedNet, check_alike, last_dim, norms_of
from tests.lib.ranks.shared_ranks import on_ranks

CHECKS = ("plain/late_training.py", "plain/user_loop.py", "core/engine/unit.py")

WIDTH = 6
STEPS = 4
MICROBATCHES = 2
Shards = Callable[..., Any]


Changes = Mapping[tuple[int, int], Mapping[str, bool]]
"""By step and microbatch: by a part of their names, whether parameters are trained from then on."""

FROZEN = {"layers.0": False, "layers.1.up.weight": False, "layers.2.norm": False}
AT_ONCE: Changes = {(0, 0): FROZEN, (2, 0): {"": True}}
ALL: Changes = {(0, 0): {"": False, "layers.2": True}, (2, 0): {"": True}}
BETWEEN: Changes = {(0, 0): FROZEN, (1, 1): {"": True}}
IN_TURN: Changes = {
    (0, 0): FROZEN,
    (1, 0): {"layers.0.up": True},
    (2, 0): {"layers.0": False, "layers.1": True},
    (2, 1): {"layers.0.norm": True},
    (3, 0): {"": True, "layers.1": False},
}


def freeze(net: nn.Module, trained: Mapping[str, bool]) -> None:
    for part, is_trained in trained.items():
        for name, param in net.named_parameters():
            if part in name:
                param.requires_grad_(is_trained)


def made(
    shard: Shards,
    changes: Changes,
    prepare: Callable[[Any], None] = lambda net: None,
    **options: Any,
) -> Any:
    torch.manual_seed(3)
    net = TiedNet(partial(NormedLayer, WIDTH), 3, WIDTH)
    prepare(net)
    freeze(net, changes[0, 0])
    for module in (*net.layers, net):
        shard(module, **options)
    for module in (*net.layers, net):
        module.set_force_sum_reduction_for_comms(True)  # gloo scales no sums
    return net


def backward(net: Any, seed: int) -> float:
    generator = torch.Generator().manual_seed(seed)
    loss = net(torch.randint(20, (6,), generator=generator)).float().square().mean()
    loss.backward()
    return loss.item()


def train(net: Any, rank: int, changes: Changes, accumulates: bool) -> list[float]:
    """All losses and norms. Parameters that are trained later are given to the optimizer then."""
    known = [param for param in net.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(known, lr=1e-2)
    found = []
    for step in range(STEPS):
        for microbatch in range(MICROBATCHES):
            if (step, microbatch) in changes:
                freeze(net, changes[step, microbatch])
            net.set_requires_gradient_sync(not accumulates or microbatch == MICROBATCHES - 1)
            found.append(backward(net, 100 * step + 10 * microbatch + rank))
        params = [param for param in net.parameters() if param.grad is not None]
        found += norms_of(net)
        ids = {id(param) for param in known}
        new = [param for param in params if id(param) not in ids]
        if new:
            optimizer.add_param_group({"params": new})
            known += new
        optimizer.step()
        optimizer.zero_grad()
    return found


def check_numbers(rank: int, changes: Changes, accumulates: bool, **options: Any) -> None:
    nets = [made(shard, changes, **options) for shard in (theirs, ours)]
    expected, found = (train(net, rank, changes, accumulates) for net in nets)
    say = f"{changes}, {accumulates=}, {options}"
    assert found == expected, say
    check_alike(nets[1], nets[0], say)


BF16 = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
OFFLOAD = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}
STAYS = {"reshard_after_forward": False}
Row = tuple[Changes, bool, dict[str, Any]]
ROWS: tuple[Row, ...] = (
    (AT_ONCE, False, {}),
    (IN_TURN, True, {}),
    (IN_TURN, False, {"shard_placement_fn": last_dim}),
    (AT_ONCE, False, OFFLOAD),
)
"""Changes, whether microbatches accumulate, and options."""
MORE: tuple[Row, ...] = (
    (ALL, True, {}),
    (BETWEEN, True, {}),
    (AT_ONCE, True, BF16),
    (IN_TURN, False, STAYS),
    (IN_TURN, True, {"shard_placement_fn": last_dim}),
    (IN_TURN, False, OFFLOAD),
)


@pytest.mark.parametrize("rows", (ROWS, pytest.param(MORE, marks=pytest.mark.full)))
@on_ranks(2)
def test_numbers_are_those_of_torchs_function(rank: int, rows: tuple[Row, ...]) -> None:
    for changes, accumulates, options in rows:
        check_numbers(rank, changes, accumulates, **options)


@on_ranks(2)
def test_gradients_are_reduced_in_the_dtype_of_compute(rank: int) -> None:
    """As of parameters that were frozen after they were sharded. Torch's function raises here."""
    policy = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16)}
    frozen_late = made(ours, {(0, 0): {}}, **policy)
    assert all(group.key.requires_grad for group in engine_of(frozen_late).groups)
    frozen_first = made(ours, AT_ONCE, **policy)
    found, expected = (train(net, rank, AT_ONCE, False) for net in (frozen_first, frozen_late))
    assert found == expected
    check_alike(frozen_first, frozen_late, "in bfloat16")


def split_over_tp(net: nn.Module, mesh: DeviceMesh) -> None:
    for layer in net.layers:
        parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


@pytest.mark.full
@on_ranks(4)
def test_over_other_meshes(rank: int) -> None:
    """Over four shards sums have another order: a unit's buffers are not torch's, which has one for
    all that is trained now."""
    kept = {"reshard_after_forward": 2, "mesh": init_device_mesh("cpu", (4,))}
    nets = [made(shard, IN_TURN, **kept) for shard in (theirs, ours)]
    expected, found = (train(net, rank, IN_TURN, accumulates=True) for net in nets)
    assert found == pytest.approx(expected, rel=1e-5)
    for param, like in zip(nets[1].parameters(), nets[0].parameters(), strict=True):
        torch.testing.assert_close(param.to_local(), like.to_local(), rtol=1e-4, atol=1e-6)
    replicas = {"mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))}
    for options in (replicas, {**replicas, "shard_placement_fn": last_dim}):
        for changes, accumulates in ((AT_ONCE, False), (IN_TURN, True)):
            check_numbers(rank, changes, accumulates, **options)


@pytest.mark.full
@on_ranks(4)
def test_with_tensor_parallelism(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for changes in (AT_ONCE, IN_TURN):
        for options in ({}, {"shard_placement_fn": last_dim}):
            nets = [
                made(
                    shard,
                    changes,
                    lambda net: split_over_tp(net, mesh["tp"]),
                    mesh=mesh["dp"],
                    **options,
                )
                for shard in (theirs, ours)
            ]
            expected, found = (train(net, rank // 2, changes, True) for net in nets)
            say = f"{changes}, {options}"
            assert found == expected, say
            check_alike(nets[1], nets[0], say)


@on_ranks(2)
def test_what_was_set_before_holds_for_later_gradients(rank: int) -> None:
    found = []
    for shard in (theirs, ours):
        net = made(shard, {(0, 0): {"": False}})
        net.layers[0].set_gradient_divide_factor(3.0)
        net.layers[1].set_all_reduce_hook(lambda output: output.mul_(0.5))
        assert not net(torch.ones(2, dtype=torch.long)).requires_grad
        net.reshard()  # torch's root does not by itself, after a forward without a backward
        net.requires_grad_(True)
        found.append(train(net, rank, AT_ONCE, accumulates=False))
    assert found[0] == found[1]


@on_ranks(2)
def test_on_one_rank(rank: int) -> None:
    group = dist.new_group([rank], use_local_synchronization=True)
    for changes in (AT_ONCE, IN_TURN):
        check_numbers(rank, changes, True, mesh=DeviceMesh.from_group(group, "cpu"))


@on_ranks(2)
def test_gradients_have_no_memory_until_they_are_trained(rank: int) -> None:
    for options in ({}, OFFLOAD):
        net = made(ours, ALL, **options)
        engine = engine_of(net)
        backward(net, rank)
        assert [grads.name for grads in engine.grads] == ["layers.2/dense"]
        assert [pair.grad is not None for pair in engine.pairs] == [
            pair.sharded.requires_grad for pair in engine.pairs
        ]
        net.zero_grad()
        freeze(net, {"layers.0.up": True})
        with torch.inference_mode():
            net(torch.ones(2, dtype=torch.long))
        backward(net, rank)
        assert len(engine.grads) == 2
        assert net.layers[0].up.weight.grad is not None
        assert net.layers[0].down.weight.grad is None
        net.zero_grad()
        freeze(net, {"layers.0.up": False})
        backward(net, rank)
        assert net.layers[0].up.weight.grad is None
        engine.runtime.synchronize()
        assert not engine.grads[0].main.allocated
        assert not engine.grads[0].bucket.allocated
