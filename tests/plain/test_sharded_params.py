"""What a call of `fully_shard` leaves in a module: DTensors of torch's, with which programs do what
they like until the model runs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard as theirs
from torch.distributed.tensor import Shard, distribute_tensor

from megatron_fsdp_adapter import fully_shard as ours
from tests.lib.ranks.shared_ranks import on_ranks

CHECKS = ("plain/sharded_params.py", "core/engine/rows_buffer.py")

WIDTH = 6


class Net(nn.Module):
    """Two layers between an embedding and a head with the same weight."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(9, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, 9, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x).tanh()
        return self.head(x)


def batch(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randint(0, 9, (2, 5), generator=generator)


def trained(net: Any, optimizers: list[Any], rank: int) -> list[float]:
    losses = []
    for step in range(3):
        loss = net(batch(step, rank)).square().mean()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)


def rows(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: param._local_tensor for name, param in module.named_parameters()}  # type: ignore[attr-defined]


def check_rows(found: nn.Module, expected: nn.Module) -> None:
    others = rows(expected)
    for name, local in rows(found).items():
        assert torch.equal(local, others[name]), name


@on_ranks(2)
def test_a_call_shards_its_module_at_once(rank: int) -> None:
    one, other = Net(), Net()
    original = other.layers[0].weight
    theirs(one.layers[0])
    ours(other.layers[0])
    check_rows(other.layers[0], one.layers[0])
    assert all(type(param) is nn.Parameter for param in other.layers[1].parameters())
    assert original.shape == (WIDTH, WIDTH)
    assert original.untyped_storage().nbytes() <= original.element_size()
    with pytest.raises(RuntimeError, match=r"reads parameter weight.*not gathered"):
        original.sum()


def _for_each_layer(net: Any, shard: Any) -> list[Any]:
    """Makes an optimizer for each layer, before the model is sharded."""
    made = []
    for layer in net.layers:
        shard(layer)
        made.append(adam(layer.parameters()))
    shard(net)
    inner = {id(param) for layer in net.layers for param in layer.parameters()}
    made.append(adam([param for param in net.parameters() if id(param) not in inner]))
    return made


def _one_layer_emptied(net: Any, shard: Any) -> list[Any]:
    """Gives a layer new memory and values; and another one a new parameter."""
    for layer in net.layers:
        shard(layer)
    shard(net)
    optimizer = adam(net.parameters())
    first, second = net.layers
    first.to_empty(device="cpu")
    with torch.no_grad():
        for param in first.parameters():
            param.fill_(0.25)
    mesh = second.weight.device_mesh
    second.weight = nn.Parameter(distribute_tensor(torch.eye(WIDTH), mesh, [Shard(0)]))
    optimizer.add_param_group({"params": [second.weight]})
    return [optimizer]


def _converted(net: Any, shard: Any) -> list[Any]:
    for layer in net.layers:
        shard(layer)
    shard(net)
    net.double().float()
    return [adam(net.parameters())]


def _settings(net: Any, shard: Any) -> list[Any]:
    """Sets what torch's modules have methods for, before the outermost call."""
    for layer in net.layers:
        shard(layer)
        layer.set_reshard_after_forward(False)
        layer.set_gradient_divide_factor(4.0)
        layer.set_force_sum_reduction_for_comms(True)
        layer.set_requires_gradient_sync(True)
    shard(net)
    net.set_requires_gradient_sync(True)
    return [adam(net.parameters())]


Start = Callable[[Any, Any], list[Any]]


@pytest.mark.parametrize("start", [_for_each_layer, _one_layer_emptied, _converted, _settings])
@on_ranks(2)
def test_what_a_program_does_before_the_first_forward(rank: int, start: Start) -> None:
    one, other = Net(), Net()
    expected, found = (
        trained(net, start(net, shard), rank) for net, shard in ((one, theirs), (other, ours))
    )
    assert found == expected
    check_rows(other, one)


@on_ranks(2)
def test_a_state_dict_of_before_the_first_forward_stays_true(rank: int) -> None:
    """torchtitan makes one when a run begins, and saves it at the end."""
    net = Net()
    for layer in net.layers:
        ours(layer)
    ours(net)
    states = get_model_state_dict(net)
    detached = [param.detach() for param in net.parameters()]
    before = states["head.weight"].full_tensor().clone()
    trained(net, [adam(net.parameters())], rank)
    for param, value, early in zip(net.parameters(), states.values(), detached, strict=True):
        assert torch.equal(param._local_tensor, value._local_tensor)  # type: ignore[attr-defined]
        assert torch.equal(param._local_tensor, early._local_tensor)  # type: ignore[attr-defined]
    assert not torch.equal(states["head.weight"].full_tensor(), before)


@on_ranks(2)
def test_a_load_before_the_first_forward(rank: int, root: Any) -> None:
    """In place, and by `assign`: optimizers keep their parameters."""
    source, net = Net(), Net()
    theirs(source)
    dcp.save(get_model_state_dict(source), checkpoint_id=root / "saved")
    with torch.no_grad():
        for param in net.parameters():
            param.zero_()
    ours(net.layers[0])
    ours(net)
    optimizer = adam(net.parameters())
    held = [id(param) for group in optimizer.param_groups for param in group["params"]]
    states = get_model_state_dict(net)
    dcp.load(states, checkpoint_id=root / "saved")
    set_model_state_dict(net, states)
    check_rows(net, source)
    net.load_state_dict({name: value.clone() for name, value in states.items()}, assign=True)
    assert [id(param) for param in net.parameters()] == held
    assert trained(net, [optimizer], rank) == trained(source, [adam(source.parameters())], rank)


@on_ranks(2)
def test_whole_tensors_are_loaded_before_the_first_forward(rank: int) -> None:
    """Also by a module around the model."""
    source, net = Net(), Net()
    with torch.no_grad():
        for param in source.parameters():
            param.add_(1.0)
    for layer in net.layers:
        ours(layer)
    around = nn.ModuleDict({"net": ours(net)})
    around.load_state_dict({f"net.{name}": value for name, value in source.state_dict().items()})
    for name, value in source.state_dict().items():
        assert torch.equal(net.get_parameter(name).full_tensor(), value)  # type: ignore[operator]


@on_ranks(2)
def test_a_tie_to_what_an_earlier_call_has_sharded(rank: int) -> None:
    """The weight belongs to the root then. Without sharding, both ranks' batches are one."""
    net = Net(tied=True)
    whole = copy.deepcopy(net)
    ours(net.embedding)
    ours(net)
    assert net.head.weight is net.embedding.weight
    trained(net, [adam(net.parameters())], rank)
    optimizer = adam(whole.parameters())
    for step in range(3):
        both = torch.cat([batch(step, 0), batch(step, 1)])
        whole(both).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    found = net.head.weight.full_tensor()  # type: ignore[operator]
    torch.testing.assert_close(found, whole.head.weight.detach(), rtol=1e-4, atol=1e-5)


@on_ranks(2)
def test_parameters_that_join_before_the_first_forward(rank: int) -> None:
    """They are refused by name, but for frozen ones, until `fully_shard` is called with a module
    that has them."""
    net = Net()
    for layer in net.layers:
        ours(layer)
    ours(net)
    torch.manual_seed(rank)
    layer: Any = net.layers[0]
    layer.adapter = nn.Linear(WIDTH, WIDTH, bias=False)
    layer.register_parameter("scale", nn.Parameter(torch.tensor(0.5), requires_grad=False))
    layer.register_forward_hook(
        lambda layer, inputs, output: output + layer.scale * layer.adapter(inputs[0])
    )
    with pytest.raises(
        ValueError, match=r"layers.0.adapter.weight joined the model after the call"
    ):
        net(batch(0, rank))
    ours(layer.adapter)
    optimizer = adam(net.parameters())
    before = layer.adapter.weight.full_tensor().clone()
    trained(net, [optimizer], rank)
    assert not torch.equal(layer.adapter.weight.full_tensor(), before)
    assert type(layer.scale) is nn.Parameter


@on_ranks(2)
def test_ranks_whose_parameters_differ_raise_in_the_call(rank: int) -> None:
    layer = nn.Linear(3, 4 + rank)
    with pytest.raises(ValueError, match=r"models differ, first at .*parameter weight \(4, 3\)"):
        ours(layer)
    layer.weight = nn.Parameter(torch.ones(4, 3))
    layer.bias = None
    ours(layer)
