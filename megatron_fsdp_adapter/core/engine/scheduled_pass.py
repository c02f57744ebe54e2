"""Passes of a schedule that calls parts of the model by itself. Each part has an autograd graph of
its own, and parts of one microbatch's forward run between parts of another's backward.

Neither a module's hook nor the gradient of an output can tell when a unit runs. So the schedule
calls this class. A pass goes through *stages* in a fixed order. A stage is a group of units that
some parts read. While one stage runs, the units of the next one are gathered.

    forward of microbatch 2     stage 0     stage 1     stage 2
    backward of microbatch 1          stage 2     stage 1     stage 0

Both passes may hold a unit at the same time. It is resharded when neither does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from .engine import FsdpEngine
from .prefetch_order import BACKWARD
from .unit import Unit


class ScheduledPass:
    """A forward, or a backward, of one microbatch.

    Args:
        stages: in the order in which the pass goes through them; a unit is in one.
        throughout: units that any part may read.
        direction: FORWARD or BACKWARD.
        before_grads: called in a backward, with units, before their gradients are reduced.
    """

    def __init__(
        self,
        engine: FsdpEngine,
        stages: Sequence[Sequence[Unit]],
        throughout: Sequence[Unit],
        direction: str,
        before_grads: Callable[[Sequence[Unit]], None] = lambda units: None,
    ) -> None:
        self._engine = engine  # whose units these are
        self._stages = stages  # in the order in which the pass goes through them
        self._throughout = throughout  # units that any part may read
        self._is_backward = direction == BACKWARD  # else it is a forward
        # Called in a backward before the gradients of units are reduced.
        self._before_grads = before_grads
        # Numbers of stages that are held: those that are entered, or gathered ahead.
        self._held: set[int] = set()
        self._entered: set[int] = set()  # numbers of stages a part of which has begun
        self._left: set[int] = set()  # numbers of stages that are over

    @contextmanager
    def part_of(self, stage: int) -> Iterator[None]:
        """A context for running a part that reads the stage's weights. The part's work is on the
        current stream, or waits for it."""
        engine = self._engine
        gather = engine.gather
        if not self._held:  # the first part
            self._begin()
        self._hold(stage)
        self._entered.add(stage)
        read = [*self._throughout, *self._stages[stage]]
        for unit in read:
            gather.unshard(unit, prefetches=False)
        following = stage + 1
        ahead = following < len(self._stages) and following not in self._left
        if ahead and gather.config.overlap_param_gather:
            self._hold(following)
            for unit in self._stages[following]:
                gather.prefetch(unit)
        if self._is_backward:
            for unit in read:
                engine.reduce.backward_begins(unit, accumulates=True)
        engine.calls_parts = True
        call = object()
        if engine.saved.enter(call):
            for unit in read:
                unit.saves_through_hooks()
        try:
            yield
        finally:
            engine.calls_parts = False
            engine.saved.leave(call)

    def is_in(self, stage: int) -> bool:
        """True if a part of the stage has begun and the stage was not left."""
        return stage in self._entered and stage not in self._left

    def leave(self, stage: int) -> None:
        """Ends the stage: its units may be resharded, and a backward reduces their gradients.

        The caller has made the current stream wait for all parts of the stage. Does nothing if the
        stage is not entered, or already left."""
        if not self.is_in(stage):
            return
        self._left.add(stage)
        is_last = stage + 1 == len(self._stages)
        units = self._stages[stage]
        for unit in units:
            self._engine.gather.unhold(unit)
        if self._is_backward:
            self._before_grads([*units, *self._throughout] if is_last else units)
            for unit in units:
                self._engine.complete(unit)
            if is_last:
                self._engine.end_backward()

    def _begin(self) -> None:
        engine = self._engine
        if self._is_backward:
            engine.start_backward(accumulates=True)
        else:
            engine.to_unsharded()
            engine.step.in_flight += 1
        engine.gather.forward_follows = False

    def _hold(self, stage: int) -> None:
        if stage not in self._held:
            self._held.add(stage)
            for unit in self._stages[stage]:
                self._engine.gather.hold(unit)
