"""What the hooks watch."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass, make_dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from megatron_fsdp_adapter.core.engine.hooks import (
    accumulates,
    has_grad_output,
    on_inputs_done,
    on_outputs_needed,
)


def test_a_parameter_passed_as_an_input_is_not_watched() -> None:
    """An output layer is called with the weight it shares. The weight's gradient is accumulated
    after a hook on it, so that the end of the unit's backward would come too early."""
    weight, hidden = nn.Parameter(torch.ones(3)), torch.ones(3, requires_grad=True)
    grads: list[torch.Tensor | None] = []
    (given, watched), kwargs = on_inputs_done(
        (weight, hidden), {"also": weight}, lambda *_: grads.append(weight.grad)
    )
    assert given is weight and kwargs["also"] is weight and watched is not hidden
    (given * watched).sum().backward()
    assert len(grads) == 1 and grads[0] is not None


@dataclass
class Answer:
    hidden: torch.Tensor
    note: str = "none"


class Plain:
    def __init__(self, hidden: torch.Tensor) -> None:
        self.hidden, self.me = hidden, self


OUTPUTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "dataclass": Answer,
    "dataclass with slots": make_dataclass("Slim", ["hidden"], slots=True),
    "object": Plain,
    "list of dataclasses in a dict": lambda hidden: {"all": [1, Answer(hidden)]},
    "dataclass of an object": lambda hidden: Answer(Plain(hidden)),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("kind", OUTPUTS)
def test_gradients_of_what_pytree_does_not_see_are_noticed(kind: str) -> None:
    hidden = torch.ones(3, requires_grad=True) * 2
    output, seen = OUTPUTS[kind](hidden), []
    assert has_grad_output(output)
    on_outputs_needed(output, seen.append)
    hidden.sum().backward()
    assert len(seen) == 1


def test_what_is_no_output_is_not_searched() -> None:
    """A module that an output refers to has weights, on which hooks would stay for life."""
    output = Plain(torch.ones(3))
    output.module = nn.Linear(2, 2)  # type: ignore[attr-defined]
    assert not has_grad_output(output)


def test_a_view_that_is_changed_in_place_is_noticed() -> None:
    leaf, seen = torch.ones(2, 3, requires_grad=True), []
    output = (leaf * 2).view(-1)
    on_outputs_needed(output, seen.append)
    output += 1
    output.sum().backward()
    assert len(seen) == 1


def test_lists_and_dicts_are_given_on_and_their_tensors_watched() -> None:
    leaf, done = torch.ones(3, requires_grad=True), []
    x, y, z = leaf * 2, leaf * 3, leaf * 4
    found, cache = [y], {"z": z}
    (first, pair, same), kwargs = on_inputs_done(
        (x, (x, 1), found), {"cache": cache}, lambda *_: done.append(1)
    )
    assert same is found and kwargs["cache"] is cache and found[0] is y and cache["z"] is z
    assert first is not x and pair[0] is not x and pair[1] == 1
    z.register_hook(lambda grad: done.append(0))
    (first + pair[0] + found[0]).sum().backward(retain_graph=True)
    assert done == [1]
    (first + pair[0] + found[0] + cache["z"]).sum().backward()
    assert sorted(done[1:]) == [0, 1]


def test_dataclasses_are_watched_and_other_objects_left() -> None:
    """A cache has what units before this one computed: their backward comes later."""
    leaf = torch.ones(3, requires_grad=True)
    y, z = leaf * 3, leaf * 4
    on_inputs_done((leaf * 2, Answer(y), [Plain(z)]), {}, print)
    assert y._backward_hooks and not z._backward_hooks


def test_a_leaf_in_a_list_leaves_the_end_to_the_end_of_backward() -> None:
    leaf, done = torch.ones(3, requires_grad=True), []
    for _ in range(2):
        (x, found), _ = on_inputs_done((leaf * 2, [leaf]), {}, lambda *_: done.append(1))
        (x + found[0]).sum().backward()
    assert not done and not leaf._backward_hooks


NAMED = namedtuple("NAMED", "x, y")


def test_named_tuples_stay_what_they_are() -> None:
    (given,), _ = on_inputs_done((NAMED(torch.ones(1, requires_grad=True), 2),), {}, print)
    assert isinstance(given, NAMED) and given.y == 2 and given.x.grad_fn is not None


def test_a_backward_of_the_backward_is_noticed() -> None:
    leaf, again = torch.ones(3, requires_grad=True), []
    (x,), _ = on_inputs_done((leaf,), {}, lambda *_: None, lambda *_: again.append(1))
    [grad] = torch.autograd.grad(x.pow(3).sum(), leaf, create_graph=True)
    assert not again
    grad.square().sum().backward()
    assert again == [1]


BACKWARDS: dict[str, tuple[Callable[[Any, Any, Any], Any], bool]] = {
    "backward": (lambda loss, x, w: loss.backward(), True),
    "backward for a weight": (lambda loss, x, w: loss.backward(inputs=[x, w]), True),
    "backward for an input": (lambda loss, x, w: loss.backward(inputs=[x]), False),
    "grad of an input": (lambda loss, x, w: torch.autograd.grad(loss, x), False),
    "grad of a weight": (lambda loss, x, w: torch.autograd.grad(loss, [x, w]), False),
}


@pytest.mark.parametrize("kind", BACKWARDS)
def test_which_backwards_accumulate(kind: str) -> None:
    run, expected = BACKWARDS[kind]
    weight, unused = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    group: Any = SimpleNamespace(params=[unused, weight], key=SimpleNamespace(requires_grad=True))
    x, told = torch.ones(3, requires_grad=True), []
    hidden = x * 2
    hidden.register_hook(lambda grad: told.append(accumulates([group])))
    run((hidden * weight).sum(), x, weight)
    assert told == [expected]
