"""What the hooks watch."""

from __future__ import annotations

from collections import deque, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, make_dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from megatron_fsdp_adapter.core.engine.hooks import (
    _tensors_in,
    accumulates,
    has_grad_output,
    on_inputs_done,
    on_outputs_needed,
    put_back,
)

CHECKS = ("core/engine/hooks.py",)


@dataclass
class Answer:
    hidden: Any
    note: str = "none"


class Plain:
    def __init__(self, hidden: Any) -> None:
        self.hidden = hidden
        self.me = self


Frozen = make_dataclass("Frozen", ["hidden"], frozen=True)
Slim = make_dataclass("Slim", ["hidden"], slots=True)
Named = namedtuple("Named", "x, y")


def made(kind: Callable[[torch.Tensor], Any]) -> tuple[torch.Tensor, Any]:
    """The result of a computation, and an input or output that holds it."""
    hidden = torch.ones(3, requires_grad=True) * 2
    return hidden, kind(hidden)


def _a_list_of_dataclasses_in_a_dict(hidden):
    return {"all": [1, Answer(hidden)]}


def _a_dataclass_of_an_object(hidden):
    return Answer(Plain(hidden))


def _a_view_that_is_changed_in_place(hidden):
    return hidden.view(-1).add_(1)


def _a_module_that_an_object_refers_to(hidden):
    return Plain(nn.ParameterList([nn.Parameter(hidden.detach())]))


OUTPUTS = {
    "a dataclass": (Answer, True),
    "a dataclass with slots": (Slim, True),
    "an object": (Plain, True),
    "a list of dataclasses in a dict": (_a_list_of_dataclasses_in_a_dict, True),
    "a dataclass of an object": (_a_dataclass_of_an_object, True),
    "a view that is changed in place": (_a_view_that_is_changed_in_place, True),
    # It has weights, on which hooks would stay for life.
    "a module that an object refers to": (
        _a_module_that_an_object_refers_to,
        False,
    ),
}


@pytest.mark.parametrize("kind", OUTPUTS)
def test_gradients_of_outputs_that_pytree_does_not_see_are_noticed(kind: str) -> None:
    make, expected = OUTPUTS[kind]
    (hidden, output) = made(make)
    seen = []
    assert has_grad_output(output) is expected
    on_outputs_needed(output, seen.append)
    (output if isinstance(output, torch.Tensor) else hidden).sum().backward()
    assert len(seen) == expected


REPLACED = "replaced"
REPLACED_INSIDE = "replaced inside"
WATCHED = "watched"
LEFT = "left"


def _a_tensor(hidden):
    return hidden


def _a_tuple(hidden):
    return (1, hidden)


def _a_named_tuple_which_stays_one(hidden):
    return Named(2, hidden)


def _a_list(hidden):
    return [hidden]


def _a_dict(hidden):
    return {"z": hidden}


def _a_dataclass_that_has_itself(hidden):
    made = Answer(hidden)
    made.note = made
    return made


def _a_deque(hidden):
    return deque([hidden])


def _a_leaf_in_a_deque(hidden):
    return deque([hidden.detach().requires_grad_()])


def _a_parameter(hidden):
    return nn.Parameter(hidden.detach())


INPUTS = {
    "a tensor": (_a_tensor, REPLACED),
    "a tuple": (_a_tuple, REPLACED),
    "a named tuple, which stays one": (_a_named_tuple_which_stays_one, REPLACED),
    "a list": (_a_list, REPLACED_INSIDE),
    "a dict": (_a_dict, REPLACED_INSIDE),
    "a dataclass": (Answer, REPLACED_INSIDE),
    "a frozen dataclass": (Frozen, REPLACED_INSIDE),
    "a dataclass with slots": (Slim, REPLACED_INSIDE),
    "a dataclass that has itself": (_a_dataclass_that_has_itself, REPLACED_INSIDE),
    "a deque": (_a_deque, WATCHED),
    # A cache has what units before this one computed: their backward comes later.
    "another object": (Plain, LEFT),
    # A hook on it would stay for life, so that backward's end is the unit's.
    "a leaf in a deque": (_a_leaf_in_a_deque, LEFT),
    # Of the embedding, with which an output layer is called: a hook comes before its accumulation.
    "a parameter": (_a_parameter, LEFT),
}
"""Inputs, and whether their tensor is another one for the module, in another container or in the
same, or the same tensor with a hook on it."""


def held_by(value: Any) -> Any:
    """The tensor in a value."""
    if isinstance(value, (list, tuple, deque)):
        return next(item for item in value if isinstance(item, torch.Tensor))
    [found] = _tensors_in(value)
    return found


@pytest.mark.parametrize("kind", INPUTS)
def test_inputs_are_replaced_or_watched_or_left(kind: str) -> None:
    make, expected = INPUTS[kind]
    _, value = made(make)
    before = held_by(value)
    (given,), _ = on_inputs_done((value,), {}, print)
    assert type(given) is type(value)
    assert (given is not value) == (expected == REPLACED)
    assert (held_by(given) is not before) == (expected in (REPLACED, REPLACED_INSIDE))
    assert bool(before._backward_hooks) == (expected == WATCHED)


def test_the_end_comes_when_the_gradients_of_all_inputs_are_known() -> None:
    leaf = torch.ones(3, requires_grad=True)
    done = []
    x = leaf * 2
    y = leaf * 3
    z = leaf * 4
    (first, pair, found), cache = on_inputs_done(
        (x, (x, 1), [y]), {"cache": {"z": z}}, lambda *_: done.append(1)
    )
    z.register_hook(lambda grad: done.append(0))
    (first + pair[0] + found[0]).sum().backward(retain_graph=True)
    assert done == [1]
    (first + pair[0] + found[0] + cache["cache"]["z"]).sum().backward()
    assert sorted(done[1:]) == [0, 1]


def test_containers_have_their_own_tensors_again() -> None:
    """Also those inside of another, and where a unit is in a unit."""
    x = torch.ones(3, requires_grad=True) * 2
    y = x * 3
    found = [x, Named(y, 1), None]
    inputs = (found, {"answer": Answer(x), "list": [y]})
    for _ in range(2):
        on_inputs_done(inputs, {}, print)
    put_back((inputs, {}))
    assert found[0] is not x  # it is the outer unit's view
    put_back((inputs, {}))
    others = inputs[1]
    assert found[0] is x and others["answer"].hidden is x
    assert found[1].x is y and others["list"][0] is y
    assert isinstance(found[1], Named)


def test_what_a_module_adds_to_a_list_is_an_output() -> None:
    (hidden, losses) = made(_a_list)
    seen = []
    (given,), _ = on_inputs_done((losses,), {}, print)
    assert given is losses
    given.append(given[0] * 3)
    on_outputs_needed(None, seen.append, ((given,), {}))
    hidden.sum().backward(retain_graph=True)
    given[0].sum().backward(retain_graph=True)
    assert seen == []
    given[1].sum().backward()
    assert len(seen) == 1


def test_the_hook_of_an_outer_unit_runs_before_that_of_an_inner_one() -> None:
    """Of a tensor that both return."""
    hidden, output = made(_a_tensor)
    other = hidden * 2
    order = []
    for unit in ("inner", "middle", "outer"):
        on_outputs_needed((output, other), lambda *_, unit=unit: order.append(unit))
    on_outputs_needed(output, lambda *_: order.append("outermost"))
    output.sum().backward()
    assert order == ["outermost", "outer", "middle", "inner"]


def _backward(loss, x, w):
    return loss.backward()


def _backward_for_a_weight(loss, x, w):
    return loss.backward(inputs=[x, w])


def _backward_for_an_input(loss, x, w):
    return loss.backward(inputs=[x])


def _grad_of_an_input(loss, x, w):
    return torch.autograd.grad(loss, x)


def _grad_of_a_weight(loss, x, w):
    return torch.autograd.grad(loss, [x, w])


BACKWARDS = {
    "backward": (_backward, True),
    "backward for a weight": (_backward_for_a_weight, True),
    "backward for an input": (_backward_for_an_input, False),
    "grad of an input": (_grad_of_an_input, False),
    "grad of a weight": (_grad_of_a_weight, False),
}


@pytest.mark.parametrize("kind", BACKWARDS)
def test_which_backwards_accumulate(kind: str) -> None:
    run, expected = BACKWARDS[kind]
    weight = nn.Parameter(torch.ones(3))
    unused = nn.Parameter(torch.ones(3))
    group: Any = SimpleNamespace(
        in_modules=[unused, weight], key=SimpleNamespace(requires_grad=True)
    )
    x = torch.ones(3, requires_grad=True)
    told = []
    hidden = x * 2
    hidden.register_hook(lambda grad: told.append(accumulates([group])))
    run((hidden * weight).sum(), x, weight)
    assert told == [expected]
