"""Plain models and loops in which gradients reach a parameter after its unit seemed done, or those
of inputs are asked for: each as a model and a way to run the forwards and backwards of one step.
Which tensors of outputs and of containers are noticed: tests/core/engine/test_engine_hooks.py."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.lib.plain.plain import Loop, Side

WIDTH = 6
ROWS = 5
STEPS = 3
LR = 0.01

NoSync = Callable[[], AbstractContextManager[None]]
Drive = Callable[[nn.Module, int, int, NoSync], None]
"""The forwards and backwards of a step: of (model, step, rank, no_sync)."""


def inputs(step: int, number: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * number + rank)
    return torch.randn(ROWS, WIDTH, generator=generator)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 7), nn.Linear(7, WIDTH)

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))

    def forward(self, x: torch.Tensor) -> Any:
        return self.compute(x)


class Chain(nn.Module):
    """Blocks between two linear layers of the root's. `times` is how often the first one runs
    where gradients are enabled."""

    block: type[nn.Module] = Block
    times = 1

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(self.block() for _ in range(4))
        self.last = nn.Linear(WIDTH, 1, bias=False)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.times if torch.is_grad_enabled() else 1):
            x = self.blocks[0](x)
        for block in self.blocks[1:]:
            x = block(x)
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.run(self.first(x)))


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).float().square().mean()


def plainly(model: nn.Module, step: int, rank: int, no_sync: NoSync) -> None:
    with no_sync():
        loss_of(model, inputs(step, 0, rank)).backward()
    loss_of(model, inputs(step, 1, rank)).backward()


# Gradients that come late.


def _autocast() -> AbstractContextManager[None]:
    return torch.autocast("cpu", torch.bfloat16)


def teacher_first(model: nn.Module, step: int, rank: int, no_sync: NoSync) -> None:
    """Autocast keeps the cast of a weight that the pass without gradients made."""
    with _autocast():
        with torch.no_grad():
            target = model(inputs(step, 1, rank))
        loss = (model(inputs(step, 0, rank)) - target).float().square().mean()
    loss.backward()


def microbatches_in_one_context(model: nn.Module, step: int, rank: int, no_sync: NoSync) -> None:
    """The second microbatch uses the casts of the first, whose nodes are older than its own."""
    with _autocast():
        with no_sync():
            loss_of(model, inputs(step, 0, rank)).backward()
        loss_of(model, inputs(step, 1, rank)).backward()


def evaluation_in_between(model: nn.Module, step: int, rank: int, no_sync: NoSync) -> None:
    """Of a forward and its backward; it calls a unit another number of times."""
    loss = loss_of(model, inputs(step, 0, rank))
    with torch.no_grad():
        model(inputs(step, 1, rank))
    loss.backward()


class Repeating(Chain):
    times = 3


class OnFirstRank(Block):
    """Passes its input on, except on the first rank."""

    computes = True

    def forward(self, x: torch.Tensor) -> Any:
        return self.compute(x) if self.computes else x


class PartsOnFirstRank(Chain):
    block = OnFirstRank


def _compute_on_first(model: nn.Module, rank: int) -> None:
    for block in model.modules():
        if isinstance(block, OnFirstRank):
            block.computes = rank == 0


def after_an_evaluation_with_gradients(
    model: nn.Module, step: int, rank: int, no_sync: NoSync
) -> None:
    """In one autocast, which keeps the casts of weights that only the first rank uses."""
    _compute_on_first(model, rank)
    with _autocast():
        model(inputs(step, 1, rank))
        loss = loss_of(model, inputs(step, 0, rank))
    loss.backward()


def two_forwards_in_a_loss(model: nn.Module, step: int, rank: int, no_sync: NoSync) -> None:
    """Weights that only the first rank uses get gradients from two forwards in one backward."""
    _compute_on_first(model, rank)
    difference = model(inputs(step, 0, rank)) - model(inputs(step, 1, rank))
    difference.square().mean().backward()


# Gradients of inputs.


def saliency_between(model: nn.Module, step: int, rank: int, no_sync: NoSync) -> None:
    """An adversarial example made before, between and after the backwards of a step."""
    x = inputs(step, 0, rank)
    for number in range(3):
        adversary = x.clone().requires_grad_()
        [grad] = torch.autograd.grad(loss_of(model, adversary), adversary)
        assert grad.abs().sum() > 0
        loss = loss_of(model, x + 0.1 * grad.sign())
        if number < 2:
            with nullcontext() if number else no_sync():
                loss.backward()


def saliency_with_frozen_layers(model: nn.Module, step: int, rank: int, no_sync: NoSync) -> None:
    """Of the pass that is trained; layers are frozen after they were wrapped."""
    for name, param in model.named_parameters():
        if "blocks.1" in name:
            param.requires_grad_(False)
    x = inputs(step, 0, rank).requires_grad_()
    loss = loss_of(model, x)
    [grad] = torch.autograd.grad(loss, x, retain_graph=True)
    (loss * (1 + grad.square().sum())).backward()


def gradient_penalty(model: nn.Module, step: int, rank: int, no_sync: NoSync) -> None:
    """As a critic is trained: the gradient's own gradient reaches the weights."""
    x = inputs(step, 0, rank).requires_grad_()
    out = model(x)
    [grad] = torch.autograd.grad(out.sum(), x, create_graph=True)
    other = model(inputs(step, 1, rank))
    (out.mean() - other.mean() + (grad.norm(dim=-1) - 1).square().mean()).backward()


# Gradients inside of a forward, which goes on after them.


def _slope(value: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
    """Its graph is kept where it is trained through."""
    trains = value.requires_grad and torch.is_grad_enabled()
    with torch.enable_grad():
        [grad] = torch.autograd.grad(value.sum(), of, create_graph=trains, retain_graph=True)
    return grad


class Forces(Chain):
    """As energy models do; also where it is evaluated without gradients."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            at = x.detach().requires_grad_()
            energy = self.last(self.run(self.first(at)))
        return self.last(self.first(_slope(energy, at))) + energy


class SlopeBetweenUnits(Chain):
    def run(self, x: torch.Tensor) -> torch.Tensor:
        given = x.detach().requires_grad_()
        with torch.enable_grad():
            middle = self.blocks[1](self.blocks[0](given))
        for block in self.blocks[2:]:
            x = block(x + 0.1 * _slope(middle, given))
        return x + self.blocks[1](x)


class TakesSlope(Block):
    """Of its own input, twice, and reads weights before and after."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2 if x.requires_grad else 0):
            x = x + 0.1 * _slope(self.compute(x), x)
        return self.compute(x)


class TakesSlopes(Chain):
    block = TakesSlope


def evaluated_too(model: nn.Module, step: int, rank: int, no_sync: NoSync) -> None:
    with torch.no_grad():
        model(inputs(step, 2, rank))
    plainly(model, step, rank, no_sync)


# The whole model computed again in backward.


def _again(model: nn.Module, x: torch.Tensor, use_reentrant: bool) -> torch.Tensor:
    output = checkpoint(model, x.requires_grad_(), use_reentrant=use_reentrant)
    return output.float().square().mean()


def checkpointed(
    model: nn.Module, step: int, rank: int, no_sync: NoSync, use_reentrant: bool = True
) -> None:
    """Two microbatches, two in one loss, and a pass that is not computed again."""
    x = inputs(step, 0, rank)
    with no_sync():
        _again(model, x.clone(), use_reentrant).backward()
        both = [_again(model, inputs(step, n, rank), use_reentrant) for n in (1, 2)]
        (both[0] * both[1]).backward()
        loss_of(model, x).backward()
    _again(model, x.clone(), use_reentrant).backward()


def trained(side: Side, kind: type[Chain] = Chain, drive: Drive = plainly) -> None:
    """Steps with gradients that are averaged over the ranks."""
    torch.manual_seed(3)
    model = side.model(kind(), fsdp_unit_modules=[kind.block])
    optimizer = side.optimizer(torch.optim.SGD(model.parameters(), lr=LR / len(side.ranks)))
    for step in range(STEPS):
        for rank in side.ranks:
            drive(model, step, rank, functools.partial(side.no_sync, model))
        optimizer.step()
        optimizer.zero_grad()


LATE_LOOPS: dict[str, Loop] = {
    name: functools.partial(trained, **how)
    for name, how in {
        "teacher first": {"drive": teacher_first},
        "microbatches in one autocast": {"drive": microbatches_in_one_context},
        "evaluation in between": {"kind": Repeating, "drive": evaluation_in_between},
        "parts of one rank in a joint loss": {
            "kind": PartsOnFirstRank,
            "drive": two_forwards_in_a_loss,
        },
        "autocast and parts of one rank": {
            "kind": PartsOnFirstRank,
            "drive": after_an_evaluation_with_gradients,
        },
        "saliency between backwards": {"drive": saliency_between},
        "saliency with frozen layers": {"drive": saliency_with_frozen_layers},
        "gradient penalty": {"drive": gradient_penalty},
        "forces": {"kind": Forces, "drive": evaluated_too},
        "slope between units": {"kind": SlopeBetweenUnits, "drive": evaluated_too},
        "slope inside of units": {"kind": TakesSlopes},
        "all of it computed again": {"drive": checkpointed},
        "all of it computed again, not reentrant": {
            "drive": functools.partial(checkpointed, use_reentrant=False)
        },
    }.items()
}
