"""Events: what can happen to a model between and during training steps.

An event takes a rig: a `Loop` of `small_model.py`, with or without an engine behind it. Scenarios
name events by the keys of `EVENTS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from megatron_fsdp_adapter.core.engine.unit import Phase
from tests.lib.engine.small_model import Exploded, Loop

# Parts of events.


@contextmanager
def failing(rig: Any, place: str) -> Iterator[None]:
    """The forward or backward of one layer ("forward 2") raises inside, and the caller sees it."""
    rig.model.explode = place
    with pytest.raises(Exploded):
        yield
    rig.model.explode = None


def end_step(rig: Any) -> None:
    rig.finish()
    rig.optimizer_step()


def backward_of_last(rig: Any, index: int) -> None:
    """Forward and backward of a microbatch that is marked as the step's last."""
    rig.last(True)
    rig.forward(index)
    rig.backward()


def backward_of_one_more(rig: Any, index: int) -> None:
    """The same of one that others follow."""
    rig.last(False)
    rig.forward(index)
    rig.backward()


def begin_without_sync(rig: Any) -> None:
    """A step up to its gradients."""
    rig.zero()
    rig.forward_backward()
    rig.finish()


def set_caches(rig: Any, caches: bool) -> None:
    """Layers keep what they make of weights from one forward to the next, or no longer."""
    for layer in rig.model.layers:
        layer.caches = caches
        layer.cached = None


# Steps.


def steps(rig: Any) -> None:
    rig.step()
    rig.step()
    rig.step()


def steps_without_sync(rig: Any) -> None:
    rig.step(sync=False)
    rig.step(sync=False)
    rig.step(sync=False)


def steps_with_full_sync(rig: Any) -> None:
    rig.step(sync=False)
    rig.sync(wait=True)
    rig.step(sync=False)
    rig.sync(wait=True)


def microbatches(rig: Any) -> None:
    rig.step(3)
    rig.step(3)


def forwards_in_flight(rig: Any) -> None:
    """Two forwards before the first backward, as a pipeline stage does."""
    for _ in range(2):
        rig.zero()
        rig.last(False)
        rig.forward(0)
        rig.forward(1)
        rig.backward()
        rig.last(True)
        rig.backward()
        end_step(rig)


def further_backwards(rig: Any) -> None:
    """Each is marked as the last, and after the second the gradients are finished."""
    for _ in range(2):
        rig.zero()
        backward_of_last(rig, 0)
        backward_of_last(rig, 1)
        rig.finish()
        backward_of_last(rig, 2)
        end_step(rig)


def last_is_not_said(rig: Any) -> None:
    """A caller ends the step after a microbatch that was not marked as the last: what was gathered
    for a forward that did not come is outdated."""
    rig.step()
    rig.zero()
    backward_of_one_more(rig, 0)
    end_step(rig)
    rig.step()


def no_step_follows(rig: Any) -> None:
    """What was loaded for a step is not used, or older than what is written then."""
    rig.step()
    begin_without_sync(rig)
    begin_without_sync(rig)
    rig.load()
    rig.optimizer_step()


def no_backward(rig: Any) -> None:
    rig.step()
    rig.zero()
    end_step(rig)
    rig.step()


def zero_before_finish(rig: Any) -> None:
    rig.zero()
    rig.forward_backward(2)
    rig.step()
    rig.zero()
    rig.forward_backward(1)
    rig.zero()
    rig.zero()
    rig.step(2)


def forward_without_backward(rig: Any) -> None:
    rig.step()
    rig.forward(0)
    rig.step()
    rig.forget_forwards()
    rig.step()


# Layers in another order, or called by themselves.


def layer_twice(rig: Any) -> None:
    rig.model.path = [0, 1, 1, 2, 3]
    rig.step(2)
    rig.step(2)


def layer_again_later(rig: Any) -> None:
    rig.model.path = [0, 1, 2, 0, 3]
    rig.step()
    rig.step()
    rig.step()


def layers_skipped(rig: Any) -> None:
    """Layers run in another order than listed, and some not at all in a step."""
    for path in ([3, 1, 0, 2], [0, 1], [0, 1, 2, 3], [2], [0, 1, 2, 3], [3, 2, 1, 0]):
        rig.model.path = path
        rig.step()


def layers_left_out(rig: Any) -> None:
    """Their updates are the last ones, and nothing gathers them."""
    rig.model.path = [0, 1]
    rig.step()
    rig.step()
    rig.step()


def inner_module_called(rig: Loop) -> None:
    """A layer is called by itself, for evaluation and for training."""
    x = torch.ones(2, rig.setup.hidden, dtype=rig.setup.dtype)
    rig.step()
    with torch.no_grad():
        rig.model.layers[1](x)
    rig.step()
    rig.zero()
    rig.model.layers[3](rig.model.layers[0](x)).float().square().mean().backward()
    end_step(rig)
    rig.step()


def gradients_late(rig: Any) -> None:
    """The second microbatch uses what the first has made of weights: those nodes are older than its
    own, so that autograd comes to them when the units are done."""
    for caches in (True, True, False):
        set_caches(rig, caches)
        rig.step(2)


# Evaluations, and exceptions.


def evaluation_between(rig: Any) -> None:
    rig.step()
    rig.evaluate()
    rig.evaluate()
    rig.step(2)
    rig.zero()
    backward_of_one_more(rig, 0)
    rig.evaluate()
    backward_of_last(rig, 1)
    rig.evaluate()
    end_step(rig)


def evaluations_before_the_step(rig: Any) -> None:
    """Between a backward and its step one raises, and one leaves layers out: gathers that nothing
    used are still running when the step writes what they read."""
    rig.step()
    begin_without_sync(rig)
    with failing(rig, "forward 1"):
        rig.evaluate()
    rig.optimizer_step()
    begin_without_sync(rig)
    rig.model.path = [0, 1]
    rig.evaluate()
    rig.model.path = [0, 1, 2, 3]
    rig.optimizer_step()
    rig.step()


def evaluation_after_one_that_raises(rig: Any) -> None:
    """Before anything is zeroed."""
    rig.step()
    rig.zero()
    with failing(rig, "backward 1"):
        rig.forward(0)
        rig.backward()
    rig.evaluate()
    rig.step()


def forward_raises(rig: Any) -> None:
    rig.step()
    rig.zero()
    with failing(rig, "forward 2"):
        rig.forward(0)
    rig.step()
    rig.step(2)


def backward_raises(rig: Any) -> None:
    """In the second microbatch, after some units of it have been reduced."""
    rig.step()
    rig.zero()
    backward_of_one_more(rig, 0)
    rig.last(True)
    with failing(rig, "backward 1"):
        rig.forward(1)
        rig.backward()
    rig.step(2)
    rig.step()


# Weights that are read or written.


def weights_read_between(rig: Any) -> None:
    """State dicts are taken after a step and in the middle of one."""
    rig.step()
    rig.weights()
    rig.step(sync=False)
    rig.weights()
    rig.zero()
    backward_of_one_more(rig, 0)
    rig.weights()
    backward_of_last(rig, 1)
    end_step(rig)


def weights_loaded(rig: Any) -> None:
    """Main weights are written from outside, while a gather of the old ones is in flight."""
    rig.step()
    rig.load()
    rig.step()
    rig.load()


def weights_written(rig: Any) -> None:
    """The same, and nothing says so: before the first step, after one, and between a backward and
    its step."""
    rig.write()
    rig.step()
    rig.write()
    rig.evaluate()
    rig.step(sync=False)
    begin_without_sync(rig)
    rig.write()
    rig.optimizer_step()
    rig.write()
    rig.step()


def exports(rig: Any) -> None:
    """After a step, with gathers in flight; with gradients; behind an evaluation; not to the
    end."""
    rig.step()
    rig.export(torch.bfloat16)
    rig.step(sync=False)
    rig.export(None)
    rig.zero()
    rig.forward_backward(2)
    rig.export(torch.bfloat16, units=2)
    rig.finish()
    rig.export(torch.float32)
    rig.optimizer_step()
    rig.export(torch.bfloat16, units=1)
    rig.evaluate()
    rig.export(torch.bfloat16)
    rig.load()
    rig.export(torch.bfloat16)
    rig.step()


def gathered_while_shown(rig: Any) -> None:
    """A gather while main weights are shown, by a backward, of an engine, before they change."""
    rig.step()
    rig.zero()
    loss = rig.loss()
    rig.weights()
    loss.backward()
    if rig.engine.units[2].phase is Phase.SHARDED:
        rig.engine.gather.start_gather(rig.engine.units[2])
    rig.engine.main_weights_changed()
    rig.step()


_ALL = (
    steps,
    steps_without_sync,
    steps_with_full_sync,
    microbatches,
    forwards_in_flight,
    evaluation_between,
    layer_twice,
    layer_again_later,
    layers_skipped,
    forward_raises,
    evaluations_before_the_step,
    backward_raises,
    evaluation_after_one_that_raises,
    zero_before_finish,
    forward_without_backward,
    weights_read_between,
    weights_loaded,
    weights_written,
    no_step_follows,
    layers_left_out,
    gradients_late,
    no_backward,
    last_is_not_said,
    further_backwards,
    exports,
    inner_module_called,
    gathered_while_shown,
)
EVENTS: dict[str, Callable[[Any], None]] = {event.__name__: event for event in _ALL}
