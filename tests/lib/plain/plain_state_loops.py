"""Loops in which state and parameter groups of an optimizer are changed by hand, or loaded."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from tests.lib.plain.plain import STEPS, Loop, Make, Side, assert_nothing_is_staged

CHANGED = 2
"""The step before which a loop changes something."""

Change = Callable[[Any, list[Any]], None]
"""Of an optimizer, and its model's parameters."""


def _adamw(params: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, **{"lr": 0.02, "eps": 1e-3, "weight_decay": 0.1, **options})


STATEFUL: tuple[Make, ...] = (
    _adamw,
    lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    lambda params: torch.optim.RMSprop(params, lr=0.01, momentum=0.5, eps=1e-3),
)


def _changed(side: Side, change: Change, make: Make = _adamw) -> None:
    for step, model, optimizer in side.steps(lambda params: make(list(params))):
        if step == CHANGED:
            change(optimizer, list(model.parameters()))
        side.step(model, optimizer, step)
        model.zero_grad()  # also of what the optimizer has not


def others_go_on_from_state_dicts(side: Side) -> None:
    """In the same bits."""
    for make in STATEFUL:
        for step, model, optimizer in side.steps(make):
            side.step(model, optimizer, step)
        other = side.model()
        other.load_state_dict(model.state_dict())
        theirs = side.optimizer(make(other.parameters()))
        theirs.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for trained, stepper in ((model, optimizer), (other, theirs)):
            side.step(trained, stepper, step + 1)
        for one, same in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(*(getattr(p, "_local_tensor", p) for p in (one, same)))


def state_of_before_the_first_step(side: Side) -> None:
    """A restart from a state dict without moments, and from one without those of some."""
    for make in STATEFUL:
        for step, model, optimizer in side.steps(make):
            if step == 0:
                first = copy.deepcopy(optimizer.state_dict())
            if step == CHANGED:
                optimizer.load_state_dict(first)
            if step == CHANGED + 1:
                part = copy.deepcopy(optimizer.state_dict())
                part["state"] = {key: part["state"][key] for key in list(part["state"])[::2]}
                optimizer.load_state_dict(part)
            side.step(model, optimizer, step)


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
        lambda optimizer, _: optimizer.state.clear(),
        _new_dict,
        _without_some,
        _other_moments,
        _steps_of_zero,
    ):
        _changed(side, change)


class Counting(torch.optim.Optimizer):
    """Has Python numbers and new tensors in its state in every step."""

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
    for step, model, optimizer in side.steps(lambda params: Counting(params, {"lr": 0.05})):
        if step == CHANGED:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        side.step(model, optimizer, step)
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


def _three_and_then_more(optimizer: Any, params: list[Any]) -> None:
    optimizer.param_groups[0]["params"].extend(params[3:6])
    optimizer.add_param_group({"params": params[6:], "lr": 0.005})


def groups_changed_by_hand(side: Side) -> None:
    for change in (_fewer, _split, _made_anew):
        _changed(side, change)
    _changed(side, _three_and_then_more, lambda params: _adamw(params[:3]))
    other = side.model()
    for step, model, optimizer in side.steps(_adamw):
        if step == CHANGED:
            optimizer.param_groups[0]["params"] += list(other.parameters())
        (side.loss(model, step) + side.loss(other, step)).backward()
        optimizer.step()
        for one in (model, other):
            one.zero_grad()


def _state_of_one_step(side: Side, make: Make) -> dict[str, Any]:
    step, model, optimizer = next(side.steps(make))
    side.step(model, optimizer, step)
    return optimizer.state_dict()


def state_of_another_class(side: Side) -> None:
    """AdamW's weight decay stays decoupled."""
    options = {"lr": 0.02, "eps": 1e-3, "weight_decay": 0.1}
    saved = _state_of_one_step(side, lambda params: torch.optim.Adam(params, **options))
    _changed(side, lambda optimizer, _: optimizer.load_state_dict(saved))


def hooks_of_a_load(side: Side) -> None:
    saved = _state_of_one_step(side, _adamw)

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
    saved = _state_of_one_step(side, _adamw)
    for group in saved["param_groups"]:
        group["lr"] = torch.tensor(0.02)
    both = [next(side.steps(_adamw)) for _ in range(2)]
    for _, _, optimizer in both:
        optimizer.load_state_dict(saved)
    both[0][2].param_groups[0]["lr"].fill_(0.001)
    for step, model, optimizer in both:
        side.step(model, optimizer, step)


class Failing(torch.optim.AdamW):
    """Raises in a step on demand."""

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
                assert_nothing_is_staged(optimizer)
            params = [param for group in optimizer.param_groups for param in group["params"]]
            side.numbers.append(sum(param.numel() for param in params))
            for param in params:
                param.grad = None


STATE_LOOPS: dict[str, Loop] = {
    one.__name__: one
    for one in (
        others_go_on_from_state_dicts,
        state_of_before_the_first_step,
        state_changed_by_hand,
        state_made_anew_in_each_step,
        groups_changed_by_hand,
        state_of_another_class,
        hooks_of_a_load,
        two_that_load_one_learning_rate,
        steps_that_raise,
    )
}
