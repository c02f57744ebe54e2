"""Loops with several optimizers, and with steps of other kinds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from tests.distributed.plain_side import LR, STEPS, Loop, Side, plain_sgd


def _halves(model: nn.Module) -> tuple[list[Any], list[Any]]:
    """Of every unit."""
    params = list(model.parameters())
    return params[::2], params[1::2]


def _step_both(side: Side, model: nn.Module, first: Any, second: Any) -> None:
    for step in range(STEPS):
        side.loss(model, step).backward()
        first.step()
        first.zero_grad()
        second.step()
        second.zero_grad()


def two_optimizers(side: Side) -> None:
    model = side.model()
    first, second = (side.sgd(half) for half in _halves(model))
    _step_both(side, model, first, second)


def two_optimizers_of_whole_units(side: Side) -> None:
    model = side.model()
    blocks = list(side.inner(model).blocks.parameters())
    ids = {id(param) for param in blocks}
    first = side.sgd(blocks)
    second = side.sgd([param for param in model.parameters() if id(param) not in ids])
    _step_both(side, model, first, second)


def an_optimizer_every_other_step(side: Side) -> None:
    """Its gradients add up meanwhile, which needs sharded gradients."""
    model = side.model()
    first, second = (side.sgd(half) for half in _halves(model))
    for step in range(STEPS):
        side.loss(model, step).backward()
        first.step()
        first.zero_grad()
        if step % 2:
            second.step()
            second.zero_grad()


def groups_added_later(side: Side) -> None:
    model = side.model()
    first, second = _halves(model)
    optimizer = side.sgd(first)
    for step in range(STEPS):
        if step == 2:
            optimizer.add_param_group({"params": second, "lr": 0.5 * LR})
        side.loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        for param in second:
            param.grad = None


def scheduler_made_before(side: Side) -> None:
    model = side.model()
    plain = torch.optim.AdamW(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.StepLR(plain, 1, 0.7)
    optimizer = side.optimizer(plain)
    for step in range(STEPS):
        side.loss(model, step).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


def closures(side: Side) -> None:
    model = side.model()
    optimizer = side.sgd(model.parameters())
    for step in range(STEPS):

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = side.loss(model, step)
            loss.backward()
            return loss

        side.note(optimizer.step(closure))


def scaled_losses(side: Side) -> None:
    """One step in four has an infinite gradient."""
    model = side.model()
    plain = plain_sgd(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(plain, 1, 0.7)
    optimizer = side.optimizer(plain)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for step in range(STEPS):
        loss = side.loss(model, step)
        scaler.scale(loss * float("inf") if step == 1 else loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        side.numbers.append(scaler.get_scale())
        optimizer.zero_grad()


class Cautious(torch.optim.SGD):
    """Steps by its base's step, and does something of its own before and after."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        params = [param for group in self.param_groups for param in group["params"]]
        for param in params:
            param.grad = param.grad * 0.5
        result = super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                param.mul_(0.99)
        return result


def a_step_that_calls_its_base(side: Side) -> None:
    plain_sgd([nn.Parameter(torch.ones(1))])  # torch hooks the base's step when one is made
    model = side.model()
    optimizer = side.optimizer(Cautious(model.parameters(), lr=LR))
    for step in range(STEPS):
        side.loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def step_in_backward(side: Side) -> None:
    model = side.model()
    optimizers = {param: side.sgd([param]) for param in model.parameters()}

    def hook(param: Any) -> None:
        optimizers[param].step()
        optimizers[param].zero_grad()

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(hook)
    for step in range(STEPS):
        side.loss(model, step).backward()


LOOPS: Mapping[str, Loop] = {
    loop.__name__: loop
    for loop in (
        two_optimizers, two_optimizers_of_whole_units, an_optimizer_every_other_step,
        groups_added_later, scheduler_made_before, closures, scaled_losses,
        a_step_that_calls_its_base, step_in_backward,
    )
}  # fmt: skip
