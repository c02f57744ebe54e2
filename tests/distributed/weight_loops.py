"""Loops that write weights, and that freeze them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from tests.distributed.plain import WIDTH, Block, device
from tests.distributed.plain_side import STEPS, Loop, Side


@torch.no_grad()
def _scale(params: Iterable[Any], factor: float) -> None:
    for param in params:
        param.mul_(factor)


def initialized_after_wrapping(side: Side) -> None:
    def init(module: nn.Module) -> None:
        _scale(module.parameters(recurse=False), 0.5)

    model = side.model()
    model.apply(init)
    optimizer = side.sgd(model.parameters())
    for step in range(STEPS):
        loss = side.loss(model, step)
        side.note(loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def averaged_weights_evaluated(side: Side) -> None:
    """Other weights are swapped in for an evaluation, and back, by a list of before."""
    model = side.model()
    params = list(model.parameters())
    optimizer = side.sgd(params)
    average = [param.detach().clone() for param in params]
    for step in range(STEPS):
        side.loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            kept = [param.detach().clone() for param in params]
            for param, mean in zip(params, average, strict=True):
                mean.lerp_(param, 0.3)
                param.copy_(mean)
            for microbatch in range(2):
                side.note(side.loss(model, step, microbatch))
            for param, value in zip(params, kept, strict=True):
                param.copy_(value)


def clamped(side: Side) -> None:
    """After each step, and after the evaluation that follows it."""
    model = side.model()
    optimizer = side.sgd(model.parameters())
    for step in range(STEPS):
        side.loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        for bound in (0.4, 0.3):
            with torch.no_grad():
                for param in model.parameters():
                    param.clamp_(-bound, bound)
                side.note(side.loss(model, step, 1))


# Freezing.


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())

    def forward(self, noise: torch.Tensor) -> torch.Tensor:
        return self.blocks(self.inner(noise))


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(x)).mean()


def _noise(step: int, number: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 100 * number + rank)
    return torch.randn(3, WIDTH, generator=generator).to(device())


def _adversaries(side: Side, clear_after: bool, freeze: Callable[[Any, bool], None]) -> None:
    torch.manual_seed(3)
    generator, critic = side.model(Generator().to(device())), side.model(Critic().to(device()))
    ours = side.optimizer(torch.optim.AdamW(generator.parameters(), lr=0.01, weight_decay=0.3))
    theirs = side.optimizer(torch.optim.AdamW(critic.parameters(), lr=0.01, weight_decay=0.3))
    for step in range(STEPS):
        freeze(critic, True)
        if not clear_after:
            theirs.zero_grad()

        def worth(rank: int, step: int = step) -> torch.Tensor:
            fake = generator(_noise(step, 1, rank)).detach()
            return critic(fake) - critic(_noise(step, 0, rank))

        side.mean(worth).backward()
        theirs.step()
        if clear_after:
            theirs.zero_grad()
        freeze(critic, False)
        side.mean(lambda rank, n=step: -critic(generator(_noise(n, 2, rank)))).backward()
        if clear_after:
            assert all(param.grad is None for param in critic.parameters())
        ours.step()
        ours.zero_grad()


def adversaries(side: Side) -> None:
    _adversaries(side, True, lambda model, trained: model.requires_grad_(trained))


def adversaries_cleared_late(side: Side) -> None:
    _adversaries(side, False, lambda model, trained: side.inner(model).requires_grad_(trained))


def layers_frozen_in_turn(side: Side) -> None:
    """By lists of before; half of each unit's parameters, and whole units."""
    model = side.model()
    params = list(model.parameters())
    optimizer = side.optimizer(torch.optim.AdamW(params, lr=0.01, weight_decay=0.3))
    for step in range(STEPS):
        for number, param in enumerate(params):
            param.requires_grad_(number % 2 == step % 2 if step < 2 else number > 5)
        side.loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


LOOPS: Mapping[str, Loop] = {
    loop.__name__: loop
    for loop in (
        initialized_after_wrapping, averaged_weights_evaluated, clamped, adversaries,
        adversaries_cleared_late, layers_frozen_in_turn,
    )
}  # fmt: skip
