"""Training through transforms of `torch.func` has the gradients of an unsharded module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

from megatron_fsdp_adapter import fully_shard, fully_shard_model
from tests.lib.gpt.gpt import full
from tests.lib.ranks.shared_ranks import on_ranks

CHECKS = ("core/engine/transforms.py", "core/engine/hooks.py")

WIDTH = 6


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def _made() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Layer(), Layer(), nn.Linear(WIDTH, WIDTH))


def _by_layers(made: nn.Module, **how: Any) -> nn.Module:
    for layer in (made[1], made[2]):  # type: ignore[index]
        fully_shard(layer, **how)
    return fully_shard(made, **how)  # type: ignore[no-any-return]


def _staying(made: nn.Module) -> nn.Module:
    return _by_layers(made, reshard_after_forward=False)


def _with_strategy(strategy: str) -> Callable[[nn.Module], nn.Module]:
    def shard(made: nn.Module) -> nn.Module:
        return fully_shard_model(made, None, [Layer], data_parallel_sharding_strategy=strategy)

    return shard


DOORS = {
    "fully_shard": _by_layers,
    "fully_shard, weights stay": _staying,
    "optim": _with_strategy("optim"),
    "no_shard": _with_strategy("no_shard"),
}

X, V = torch.linspace(-1, 1, 3 * WIDTH).view(3, WIDTH), torch.linspace(1, 2, 3 * WIDTH).view(3, -1)


def _both(outputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return torch.stack([one.square().mean() for one in outputs]).sum()


def _vjp(made: nn.Module) -> torch.Tensor:
    output, of = vjp(made, X)
    return _both((output, of(torch.ones_like(output))[0]))


def _dual(made: nn.Module) -> torch.Tensor:
    with forward_ad.dual_level():
        output = forward_ad.unpack_dual(made(forward_ad.make_dual(X, V)))
        return _both((output.primal, output.tangent))


def _by_cotangent(made: nn.Module) -> torch.Tensor:
    """A product with the Jacobian, by two backwards."""
    with torch.enable_grad():
        x = X.clone().requires_grad_()
        output = made(x)
        cotangent = torch.zeros_like(output).requires_grad_()
        [slope] = torch.autograd.grad(output, x, cotangent, create_graph=True)
        [product] = torch.autograd.grad(slope, cotangent, V, create_graph=True)
        return _both((output, product))


def _sum(made: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: made(x).square().sum()


# fmt: off
LOSSES: dict[str, Callable[[nn.Module], torch.Tensor]] = {
    "jvp": lambda made: _both(jvp(made, (X,), (V,))),
    "the tangent of jvp": lambda made: jvp(made, (X,), (V,))[1].square().mean(),
    "a dual level": _dual,
    "vmap": lambda made: vmap(made)(X).square().mean(),
    "vmap of jvp": lambda made: _both(vmap(lambda x, v: jvp(made, (x,), (v,)))(X, V)),
    "jvp of vmap": lambda made: _both(jvp(vmap(made), (X,), (V,))),
    "jvp of jvp": lambda made: _both(jvp(lambda x: jvp(made, (x,), (V,))[1], (X,), (V,))),
    "jacfwd": lambda made: jacfwd(made)(X[0]).square().mean(),
    "vjp": _vjp,
    "the derivative by a cotangent": _by_cotangent,
    "grad": lambda made: grad(_sum(made))(X).square().mean(),
    "vmap of grad": lambda made: vmap(grad(_sum(made)))(X).square().mean(),
    "jacrev": lambda made: jacrev(made)(X[0]).square().mean(),
    "hessian": lambda made: hessian(_sum(made))(X[0]).square().mean(),
}
# fmt: on


def _grads(made: nn.Module) -> dict[str, torch.Tensor]:
    found = {}
    for name, param in made.named_parameters():
        if param.grad is not None:
            found[name.removeprefix("module.")] = full(param.grad)
    return found


@pytest.mark.parametrize("door", DOORS)
@on_ranks(2)
def test_a_loss_through_a_transform(rank: int, door: str) -> None:
    made = DOORS[door](_made())
    for name, loss_of in LOSSES.items():
        whole = _made()
        losses = []
        for one in (whole, made):
            loss = loss_of(one)
            loss.backward()
            losses.append(loss.detach())
            with torch.no_grad():
                losses.append(loss_of(one))
        torch.testing.assert_close(losses[2:], losses[:2], msg=lambda text, name=name: name + text)
        expected = _grads(whole)
        found = _grads(made)
        # Without a transform a parameter that no backward reaches has no gradient, too.
        assert found.keys() == expected.keys(), name
        torch.testing.assert_close(found, expected, msg=lambda text, name=name: name + text)
        made.zero_grad()


@pytest.mark.parametrize("door", DOORS)
@on_ranks(2)
def test_what_is_unfrozen_may_first_be_trained_inside_a_transform(rank: int, door: str) -> None:
    """And what is frozen may be so there."""
    whole, made = _made(), _made()
    for one in (whole, made):
        one[0].requires_grad_(False)  # type: ignore[index,union-attr]
    made = DOORS[door](made)
    loss_of = LOSSES["jvp"]
    for trains in (False, True, False):
        found = []
        for one in (whole, made):
            # `fully_shard_model` has the layers in a module of its own.
            layers = getattr(one, "module", one)
            layers[0].requires_grad_(trains)
            loss_of(one).backward()
            found.append(_grads(one))
            one.zero_grad()
        torch.testing.assert_close(*found)
