"""Forwards that no backward follows, and lists that layers fill, in loops over `fully_shard`.

Numbers are those of one unsharded module."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed._composable import replicate
from torch.distributed.fsdp import FSDPModule

from megatron_fsdp_adapter import fully_shard, fully_shard_model
from tests.lib.gpt.gpt import full
from tests.lib.plain.fsdp2_shapes import model
from tests.lib.plain.plain import tokens
from tests.lib.ranks.shared_ranks import on_ranks

CHECKS = (
    "plain/user_loop.py",
    "plain/fsdp2.py",
    "plain/fsdp2_model.py",
    "plain/optimizer_rows.py",
    "plain/listed.py",
    "plain/joined.py",
)

STEPS = 3

Look = Callable[[Any, torch.Tensor], Any]
"""Of a model and tokens. Returns a number."""


def _forward(made: Any, data: torch.Tensor) -> torch.Tensor:
    return made(data).mean()


def _raises(made: Any, data: torch.Tensor) -> torch.Tensor:
    hook = made.head.register_forward_pre_hook(lambda *_: {}["a forward that raises"])
    with suppress(KeyError):
        made(data)
    hook.remove()
    return torch.zeros(())


def _grad_of_hidden(made: Any, data: torch.Tensor) -> torch.Tensor:
    """As a saliency is computed: no gradient of a weight."""
    seen = []
    hook = made.blocks[1].register_forward_hook(lambda module, args, out: seen.append(out))
    loss = made(data).mean()
    hook.remove()
    return torch.autograd.grad(loss, seen)[0].sum()


LOOKS: dict[str, Look] = {
    "a forward": _forward,
    "a forward that raises": _raises,
    "a gradient of activations": _grad_of_hidden,
}


def _look_before_clipping(made: Any, optimizer: Any, look: Look, data: torch.Tensor) -> Any:
    seen = look(made, data)
    norm = nn.utils.clip_grad_norm_(made.parameters(), 0.05)
    optimizer.step()
    optimizer.zero_grad()
    return [seen, norm]


def _look_before_step(made: Any, optimizer: Any, look: Look, data: torch.Tensor) -> Any:
    seen = look(made, data)
    optimizer.step()
    optimizer.zero_grad()
    return [seen]


def _look_before_clearing(made: Any, optimizer: Any, look: Look, data: torch.Tensor) -> Any:
    optimizer.step()
    seen = look(made, data)
    made.zero_grad()
    return [seen]


def _look_before_a_step_by_hand(made: Any, optimizer: Any, look: Look, data: torch.Tensor) -> Any:
    """Over a list of parameters from before. The first rank alone lists them again."""
    seen = look(made, data)
    if isinstance(made, FSDPModule) and torch.distributed.get_rank() == 0:
        assert all(hasattr(param, "full_tensor") for param in made.parameters())
    with torch.no_grad():
        for param in optimizer.param_groups[0]["params"]:
            param.sub_(0.1 * param.grad)
            param.grad = None
    return [seen]


ENDS = (
    _look_before_clipping,
    _look_before_step,
    _look_before_clearing,
    _look_before_a_step_by_hand,
)


def _trained(made: Any, look: Look, end: Callable[..., Any]) -> list[float]:
    look(made, tokens(9, 0, 0))
    optimizer = torch.optim.SGD(made.parameters(), lr=0.5, momentum=0.9)
    found = []
    for step in range(STEPS):
        data = tokens(step, 0, 0)
        loss = made(data).mean()
        loss.backward()
        found += [loss, *end(made, optimizer, look, data)]
    found.append(made(data).mean())
    return [full(number.detach()).item() for number in found]


@on_ranks(2)
def test_modules_inside_a_model_list_its_parameters(rank: int) -> None:
    """The sharded ones, also where a forward waits for its backward."""
    for door in (fully_shard, fully_shard_model):
        inner = model()
        made = door(inner)
        made(tokens(0, 0, 0)).mean().backward()
        loss = made(tokens(1, 0, 0)).mean()
        inside = (inner.blocks[0], inner.head, *([inner] if made is not inner else []))
        for module in inside:
            assert all(hasattr(param, "full_tensor") for param in module.parameters())
            module.zero_grad()
            assert all(param.grad is None for param in module.parameters())
        loss.backward()
        whole = model()
        whole(tokens(1, 0, 0)).mean().backward()
        torch.testing.assert_close(inner.head.weight.grad.full_tensor(), whole.head.weight.grad)


@pytest.mark.parametrize("look", LOOKS)
@on_ranks(2)
def test_a_forward_that_no_backward_follows(rank: int, look: str) -> None:
    """Before the optimizer is made, and at any time of a step."""
    for end in ENDS:
        whole = model()
        made = model()
        for block in made.blocks:
            fully_shard(block)
        fully_shard(made)
        expected = _trained(whole, LOOKS[look], end)
        found = _trained(made, LOOKS[look], end)
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-6), end.__name__


@on_ranks(2)
def test_weights_are_not_written_between_a_forward_and_its_backward(rank: int) -> None:
    made = fully_shard(model())
    loss = made(tokens(0, 0, 0)).mean()
    with torch.no_grad():
        for param in made.parameters():
            param.mul_(0.5)
    with pytest.raises(RuntimeError, match="written between a forward and its backward"):
        loss.backward()


@on_ranks(2)
def test_ddp_leaves_a_sharded_part_alone(rank: int) -> None:
    found = []
    for is_sharded in (False, True):
        made = model()
        if is_sharded:
            fully_shard(made.blocks[1])
        replicate(made)
        optimizer = torch.optim.SGD(made.parameters(), lr=0.1, foreach=False)
        losses = []
        for step in range(3):
            loss = made(tokens(step, 0, rank)).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        found.append(losses)
    assert found[1] == pytest.approx(found[0], rel=1e-6)


@on_ranks(2)
def test_two_units_with_one_module(rank: int) -> None:
    found = []
    for is_sharded in (False, True):
        made = model()
        made.blocks[2].up = made.blocks[0].up
        if is_sharded:
            for block in made.blocks:
                fully_shard(block)
            fully_shard(made)
        found.append(_trained(made, _forward, _look_before_clipping))
    assert found[1] == pytest.approx(found[0], rel=1e-4, abs=1e-6)


class Filling(nn.Module):
    """A layer that appends to a list that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.side = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 1)

    def forward(self, x: torch.Tensor, found: list[torch.Tensor], fills: bool) -> torch.Tensor:
        y = self.down(torch.tanh(self.up(x)))
        if fills:
            found.append(self.side(x).mean())
        return x + y


class Filled(nn.Module):
    """Layers with a list of auxiliary losses, each of them called once or twice."""

    def __init__(self, layers: int, calls: int) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(Filling() for _ in range(layers))
        self.out = nn.Linear(6, 6)
        self.calls = calls
        self.run = layers  # how many of them run

    def forward(self, x: torch.Tensor, fills: bool = True, as_loss: bool = True) -> Any:
        """A loss, or the output and the sum of what is in the list."""
        found: list[torch.Tensor] = []
        for _ in range(self.calls):
            for layer in self.layers[: self.run]:
                x = layer(x, found, fills)
        rest = sum(found, torch.zeros(()))
        x = self.out(x)
        return x.square().mean() + rest if as_loss else (x, rest)


def _filled(is_sharded: bool, layers: int, calls: int = 1) -> Any:
    made = Filled(layers, calls)
    if is_sharded:
        for layer in made.layers:
            fully_shard(layer)
        fully_shard(made)
    return made


def _rows(step: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(step))


@on_ranks(2)
def test_a_layer_called_twice_fills_a_list_in_two_forwards_of_one_loss(rank: int) -> None:
    found = []
    for is_sharded in (False, True):
        made = _filled(is_sharded, 1, calls=2)
        optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
        for step in range(2):
            one, losses = made(_rows(step), as_loss=False)
            other, more = made(_rows(step + 5), as_loss=False)
            loss = (one - other).square().mean() + one.square().mean() + 0.1 * (losses + more)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
    assert found[2:] == pytest.approx(found[:2], rel=1e-5)


def _unsharded(made: Any) -> dict[Any, Any]:
    """By layer, the unsharded weight, once the layer has run."""
    found: dict[Any, Any] = {}
    for layer in made.layers:
        layer.register_forward_pre_hook(lambda one, *_: found.update({one: one.up.weight}))
    return found


def _is_there(weight: Any) -> bool:
    return weight.untyped_storage().nbytes() > 0  # type: ignore[no-any-return]


@on_ranks(2)
def test_weights_go_after_each_layer_that_fills_a_list(rank: int) -> None:
    made = _filled(True, 5)
    weights = _unsharded(made)
    gathered = []

    def look(module: nn.Module, grads: Any) -> None:
        gathered.append(sum(map(_is_there, weights.values())))

    for _ in range(2):
        gathered.clear()
        for layer in made.layers:
            layer.up.register_full_backward_pre_hook(look)
        made(_rows(0).requires_grad_()).backward()
    assert max(gathered) <= 2


@on_ranks(2)
def test_gradients_of_what_a_list_has(rank: int) -> None:
    """Asked for before further units are given the list."""
    found = []
    for is_sharded in (False, True):
        made = _filled(is_sharded, 3)
        lists: list[list[torch.Tensor]] = []

        def look(module: nn.Module, args: Any, out: Any, lists: Any = lists) -> None:
            lists.append(args[1])
            args[1][0].retain_grad()

        made.layers[0].register_forward_hook(look)
        made(_rows(0)).backward()
        found.append(lists[0][0].grad)
    assert found[1] == found[0]


@on_ranks(2)
def test_a_list_is_filled_on_one_rank_alone(rank: int) -> None:
    """The others' losses are without what is in the list."""
    whole, made = _filled(False, 4), _filled(True, 4)
    made(_rows(0), fills=rank == 0).backward()
    (whole(_rows(0), True) / 2).backward()
    (whole(_rows(0), False) / 2).backward()
    for one, same in zip(made.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(one.grad.full_tensor(), same.grad)


@on_ranks(2)
def test_what_is_unsharded_by_hand_is_held_for_one_forward(rank: int) -> None:
    made = _filled(True, 4)
    weights = _unsharded(made)
    held = []
    made.layers[3].register_forward_pre_hook(
        lambda *_: held.append(_is_there(weights[made.layers[0]]))
    )
    for step in range(2):
        if step == 0:
            made.layers[0].unshard(async_op=True)
        made(_rows(step)).backward()
    assert held == [False, False]


@on_ranks(2)
def test_gradients_of_a_backward_that_is_not_the_last(rank: int) -> None:
    """As under FSDP2, `set_is_last_backward` does not say whether gradients are reduced."""
    made = fully_shard(model())
    made.set_is_last_backward(False)
    for step in range(2):
        made(tokens(step, 0, 0)).mean().backward()
        assert made.head.weight.grad is not None
    made.zero_grad()
    made(tokens(2, 0, 0)).mean().backward()
    whole = model()
    whole(tokens(2, 0, 0)).mean().backward()
    torch.testing.assert_close(made.head.weight.grad.full_tensor(), whole.head.weight.grad)


@on_ranks(2)
def test_a_gradient_is_taken_away_after_one_of_inputs(rank: int) -> None:
    made = fully_shard(model())
    made(tokens(0, 0, 0)).mean().backward()
    _grad_of_hidden(made, tokens(1, 0, 0))
    assert made.head.weight.grad is not None
    made.head.weight.grad = None
    assert dict(made.named_parameters())["head.weight"].grad is None


@on_ranks(2)
def test_one_rank_reads_parameters_after_a_forward_that_leaves_layers_out(rank: int) -> None:
    """Gathers of those were begun, and no rank waits for them."""
    made = _filled(True, 4)
    for layers in (4, 2):
        made.run = layers
        made(_rows(0))
    if rank == 0:
        assert all(hasattr(param, "full_tensor") for param in made.parameters())
    torch.distributed.barrier()


class Adapted(nn.Module):
    """A linear layer with an adapter beside it."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base, self.adapter = base, nn.Linear(10, 23)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.adapter(x)


def _puts_adapters(made: Any) -> None:
    made.blocks[0].up = Adapted(made.blocks[0].up)


def _registers(made: Any) -> None:
    made.blocks[0].up.register_parameter("gain", nn.Parameter(torch.ones(2)))


@pytest.mark.parametrize("join", [_puts_adapters, _registers])
@on_ranks(2)
def test_parameters_that_join_a_sharded_model(rank: int, join: Callable[[Any], None]) -> None:
    """They are an error by name if they are trained, and are left alone otherwise."""
    for door in (fully_shard, fully_shard_model):
        inner = model()
        made = door(inner)
        made(tokens(0, 0, 0)).mean().backward()
        join(inner)
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"joined the model.*'blocks\.0\.up\."):
                made(tokens(0, 0, 0))
        inner.blocks[0].up.requires_grad_(False)
        made(tokens(0, 0, 0)).mean().backward()
