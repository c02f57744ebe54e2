"""Loops that change the optimizer's state and parameter groups by hand, or load them."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from tests.distributed.plain_side import STEPS, Loop, Side

CHANGED = 2
"""The step before which a loop changes something."""

Change = Callable[[Any, list[Any]], None]
"""Of an optimizer, and its model's parameters."""


def _adamw(params: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, **{"lr": 0.02, "eps": 1e-3, "weight_decay": 0.1, **options})


KINDS: Mapping[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": _adamw,
    "SGD": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=0.01, momentum=0.5, eps=1e-3),
}


def _step(side: Side, model: nn.Module, optimizer: Any, step: int) -> None:
    side.loss(model, step).backward()
    optimizer.step()
    optimizer.zero_grad()


def _changed(side: Side, change: Change, make: Callable[[Any], Any] = _adamw) -> None:
    model = side.model()
    params = list(model.parameters())
    optimizer = side.optimizer(make(params))
    for step in range(STEPS):
        if step == CHANGED:
            change(optimizer, params)
        _step(side, model, optimizer, step)
        model.zero_grad()  # also of what the optimizer has not


def state_of_before_the_first_step(side: Side) -> None:
    """A restart from a state dict without moments, and from one without those of some."""
    for make in KINDS.values():
        model = side.model()
        optimizer = side.optimizer(make(model.parameters()))
        first = copy.deepcopy(optimizer.state_dict())
        for step in range(STEPS):
            if step == CHANGED:
                optimizer.load_state_dict(first)
            if step == CHANGED + 1:
                part = copy.deepcopy(optimizer.state_dict())
                part["state"] = {key: part["state"][key] for key in list(part["state"])[::2]}
                optimizer.load_state_dict(part)
            _step(side, model, optimizer, step)


def _new_dict(optimizer: Any, params: list[Any]) -> None:
    optimizer.state = defaultdict(dict)


def _without_some(optimizer: Any, params: list[Any]) -> None:
    for param in params[::2]:
        del optimizer.state[param]
    optimizer.state[params[1]].clear()
    optimizer.state[params[3]] = {}


def _other_moments(optimizer: Any, params: list[Any]) -> None:
    for param in params[::2]:
        optimizer.state[param]["exp_avg"] = torch.zeros_like(param)
    of_others = optimizer.state[params[1]]
    of_others["exp_avg_sq"] = of_others["exp_avg_sq"] * 4
    optimizer.state[params[3]] = {**optimizer.state[params[3]]}


def _steps_of_zero(optimizer: Any, params: list[Any]) -> None:
    for param in params[::2]:
        optimizer.state[param]["step"] = torch.tensor(0.0)


def state_changed_by_hand(side: Side) -> None:
    for change in (
        lambda optimizer, _: optimizer.state.clear(), _new_dict, _without_some, _other_moments,
        _steps_of_zero,
    ):  # fmt: skip
        _changed(side, change)


class Counting(torch.optim.Optimizer):
    """Has Python numbers and new tensors in its state in every step."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                state["step"] = state.get("step", 0) + 1
                state["mean"] = 0.5 * state.get("mean", 0) + param.grad
                param.add_(state["mean"], alpha=-group["lr"] / state["step"])


def state_made_anew_in_each_step(side: Side) -> None:
    """What a program sees, and saves, is what the last step has left."""
    model = side.model()
    optimizer = side.optimizer(Counting(model.parameters()))
    for step in range(STEPS):
        if step == CHANGED:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        _step(side, model, optimizer, step)
        side.numbers.append(max(state["step"] for state in optimizer.state.values()))


def _fewer(optimizer: Any, params: list[Any]) -> None:
    optimizer.param_groups[0]["params"] = params[::2]


def _split(optimizer: Any, params: list[Any]) -> None:
    optimizer.param_groups[0]["params"] = params[:5]
    optimizer.add_param_group({"params": params[5:], "lr": 0.005})


def _made_anew(optimizer: Any, params: list[Any]) -> None:
    optimizer.param_groups.clear()
    optimizer.add_param_group({"params": params[4:], "lr": 0.005})
    optimizer.add_param_group({"params": params[:4]})


def groups_changed_by_hand(side: Side) -> None:
    for change in (_fewer, _split, _made_anew):
        _changed(side, change)
    _changed(
        side, lambda optimizer, params: optimizer.param_groups[0]["params"].extend(params[3:]),
        lambda params: _adamw(params[:3]),
    )  # fmt: skip
    whole = side.model()
    other = side.model()
    optimizer = side.optimizer(_adamw(whole.parameters()))
    for step in range(STEPS):
        if step == CHANGED:
            optimizer.param_groups[0]["params"] += list(other.parameters())
        (side.loss(whole, step) + side.loss(other, step)).backward()
        optimizer.step()
        whole.zero_grad()
        other.zero_grad()


def _trained(side: Side, optimizer: Any) -> dict[str, Any]:
    model = side.model()
    optimizer = side.optimizer(optimizer(model.parameters()))
    _step(side, model, optimizer, 0)
    return optimizer.state_dict()


def state_of_another_class(side: Side) -> None:
    """AdamW's weight decay stays decoupled."""
    options = {"lr": 0.02, "eps": 1e-3, "weight_decay": 0.1}
    saved = _trained(side, lambda params: torch.optim.Adam(params, **options))
    _changed(side, lambda optimizer, _: optimizer.load_state_dict(saved))


def hooks_of_a_load(side: Side) -> None:
    saved = _trained(side, _adamw)

    def before(optimizer: Any, state: dict[str, Any]) -> dict[str, Any]:
        groups = [{**group, "lr": 0.004} for group in state["param_groups"]]
        return {**state, "param_groups": groups}

    def change(optimizer: Any, params: list[Any]) -> None:
        optimizer.register_load_state_dict_pre_hook(before)
        optimizer.register_load_state_dict_post_hook(lambda self: side.numbers.append(1.0))
        optimizer.load_state_dict(saved)
        side.numbers.append(saved["param_groups"][0]["lr"])

    _changed(side, change)


def two_that_load_one_learning_rate(side: Side) -> None:
    """A tensor, which one of them fills."""
    saved = _trained(side, _adamw)
    for group in saved["param_groups"]:
        group["lr"] = torch.tensor(0.02)
    first, second = side.model(), side.model()
    optimizers = [side.optimizer(_adamw(model.parameters())) for model in (first, second)]
    for optimizer in optimizers:
        optimizer.load_state_dict(saved)
    optimizers[0].param_groups[0]["lr"].fill_(0.001)
    for model, optimizer in zip((first, second), optimizers, strict=True):
        _step(side, model, optimizer, 0)


class Failing(torch.optim.AdamW):
    """Raises in a step when it is told to."""

    fails = False

    def _init_group(self, *args: Any) -> Any:
        if self.fails:
            raise MemoryError
        return super()._init_group(*args)


def steps_that_raise(side: Side) -> None:
    """The batch is left out; gradients are cleared by way of the parameter groups."""
    for scheduled in (False, True):
        model = side.model()
        plain = Failing(model.parameters(), lr=0.02, eps=1e-3)
        if scheduled:
            torch.optim.lr_scheduler.StepLR(plain, 1, 0.7)
        optimizer = side.optimizer(plain)
        for step in range(STEPS):
            optimizer.fails = step == CHANGED - 1
            side.loss(model, step).backward()
            try:
                optimizer.step()
            except MemoryError:
                side.numbers.append(step)
            params = [param for group in optimizer.param_groups for param in group["params"]]
            side.numbers.append(sum(param.numel() for param in params))
            for param in params:
                param.grad = None


LOOPS: Mapping[str, Loop] = {
    loop.__name__: loop
    for loop in (
        state_of_before_the_first_step, state_changed_by_hand, state_made_anew_in_each_step,
        groups_changed_by_hand, state_of_another_class, hooks_of_a_load,
        two_that_load_one_learning_rate, steps_that_raise,
    )
}  # fmt: skip
