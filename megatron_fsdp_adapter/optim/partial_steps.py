"""A step of an inner optimizer taken as several, each on some of its parameters."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

Options = dict[str, Any]
"""Of a parameter group, all but its parameters."""


def options_of(group: dict[str, Any]) -> Options:
    """A copy that a step leaves as it is."""
    return _copied({name: value for name, value in group.items() if name != "params"})


def set_options(group: dict[str, Any], options: Options) -> None:
    """Gives a group `options`, and no others: fused optimizers count a step in each call."""
    for added in options_of(group).keys() - options.keys():
        del group[added]
    group.update(_copied(options))


def _copied(options: Options) -> Options:
    """A step that is counted in a tensor is counted in place."""
    return {n: v.clone() if isinstance(v, torch.Tensor) and n == "step" else v
            for n, v in options.items()}


def steps_in_steps(kind: type) -> bool:
    """Whether a step may run the hooks of a step more than once: a subclass's calls its base's."""
    own = (vars(base).get("step") for base in kind.__mro__)
    hooked = {inspect.unwrap(step) for step in own if step and getattr(step, "hooked", False)}
    return len(hooked) > 1


def plain_step(optimizer: Any) -> None:
    """The class's own step, without the hooks of a step: those run once, around all parts."""
    step = type(optimizer).step
    while getattr(step, "hooked", False):
        step = step.__wrapped__
    step(optimizer)


def ending(step: Callable[..., Any], end: Callable[..., None]) -> Callable[..., Any]:
    """A step that calls `end` with its arguments if it raises, as torch runs no hooks then."""

    @functools.wraps(step)
    def stepping(*args: Any, **kwargs: Any) -> Any:
        try:
            return step(*args, **kwargs)
        except BaseException:
            end(*args)
            raise

    return stepping
