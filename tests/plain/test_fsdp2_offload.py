"""`CPUOffloadPolicy`: parameters and gradients are in host memory, where torch's optimizers step.
Torch's function gives the expected numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as theirs

from megatron_fsdp_adapter import fully_shard as ours
from megatron_fsdp_adapter import fully_shard_optimizer
from megatron_fsdp_adapter.plain.fsdp2_model import engine_of
from tests.lib.plain.beside_torch import check_alike
from tests.lib.plain.carried_over import carried_over
from tests.lib.ranks.shared_ranks import on_ranks

CHECKS = ("plain/host_grads.py", "plain/call_options.py", "plain/fsdp2_model.py")

WIDTH = 6
OFFLOAD = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}
BF16 = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
Shards = Callable[..., Any]


def made(shard: Shards, **options: Any) -> Any:
    torch.manual_seed(4)
    net = nn.Sequential(nn.Linear(WIDTH, 9), nn.ReLU(), nn.Linear(9, WIDTH), nn.Linear(WIDTH, 3))
    net[2].bias.requires_grad_(False)
    for module in (net[0], net[2], net):
        shard(module, **OFFLOAD, **options)
    return net


def backward(net: Any, seed: int) -> float:
    generator = torch.Generator().manual_seed(seed)
    loss = net(torch.randn(4, WIDTH, generator=generator)).square().mean()
    loss.backward()
    return loss.item()


def train(net: Any, rank: int, microbatches: int) -> tuple[Any, list[float]]:
    """The optimizer, and all losses and norms. Clips between backwards too."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    found = []
    for step in range(3):
        for microbatch in range(microbatches):
            found.append(backward(net, 100 * step + 10 * microbatch + rank))
            norm = nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            found.append(norm.full_tensor().item())  # type: ignore[attr-defined]
        optimizer.step()
        optimizer.zero_grad()
    return optimizer, found


@pytest.mark.parametrize(
    ("options", "microbatches"),
    [({}, 1), ({}, 2), (BF16, 2), ({"reshard_after_forward": False}, 1)],
)
@on_ranks(2)
def test_numbers_are_those_of_torchs_function(
    rank: int, options: dict[str, Any], microbatches: int
) -> None:
    one, other = (made(shard, **options) for shard in (theirs, ours))
    before = {name: value.to_local() for name, value in other.state_dict().items()}
    expected, found = (train(net, rank, microbatches)[1] for net in (one, other))
    assert found == expected
    check_alike(other, one)
    for name, value in other.state_dict().items():
        assert before[name].data_ptr() == value.to_local().data_ptr(), name


@on_ranks(2)
def test_gradients_of_several_backwards(rank: int) -> None:
    """Also of ones that do not end a step, after some were cleared."""
    nets = [made(shard) for shard in (theirs, ours)]
    for net in nets:
        backward(net, rank)
        net[0].weight.grad = None
        net[3].weight.grad.mul_(3)
        for ends in (False, False, True):
            net.set_requires_gradient_sync(ends)
            backward(net, 10 + rank)
    for one, other in zip(*(net.parameters() for net in nets), strict=True):
        if one.requires_grad:
            torch.testing.assert_close(other.grad.to_local(), one.grad.to_local())


@on_ranks(2)
def test_a_checkpoint(rank: int, root: Path) -> None:
    one, other = (made(shard) for shard in (ours, theirs))
    optimizer, _ = train(one, rank, 1)
    resumed = torch.optim.AdamW(other.parameters(), lr=1e-2)
    carried_over(one, optimizer, other, resumed, root / "saved")
    check_alike(one, other)


@on_ranks(2)
def test_gradients_are_copies_in_host_memory(rank: int) -> None:
    """On a machine without a GPU they differ from sums on the device by their memory alone."""
    net = made(ours)
    backward(net, rank)
    engine = engine_of(net)
    trained = [pair for pair in engine.pairs if pair.grad is not None]
    for pair in trained:
        grads = pair.group.grads
        assert pair.sharded.grad is pair.grad
        own = grads.host.items(grads.shards.held)[pair.index]
        assert pair.grad._local_tensor.data_ptr() == own.data_ptr()
        assert grads.is_on_host
        assert not grads.main.allocated
    with pytest.raises(ValueError, match="Call fully_shard_optimizer before the model first runs"):
        fully_shard_optimizer(torch.optim.AdamW(net.parameters()))
    late = made(ours)
    fully_shard_optimizer(torch.optim.AdamW(late.parameters()))
    assert engine_of(late).config.offload
