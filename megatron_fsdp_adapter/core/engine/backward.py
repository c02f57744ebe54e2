"""A backward pass: which units it reaches, and what follows when one is done."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from megatron_fsdp_adapter.core.config import EngineConfig

from .gather import GatherPipeline
from .reduce import ReducePipeline
from .unit import Unit


class BackwardPass:
    """The backward that runs, or the last one.

    Args:
        units: in module order, root last.

    Attributes:
        running: whether one is running.
        accumulates: whether it accumulates gradients of weights.
        completed: ordinals in the order in which the last one that accumulates completed the units;
            before the first one, what most models do: their first unit's inputs need no gradient,
            so that it is completed at the end, with the root.
        late_seen: whether kept gradients came to some unit after it had been reduced.
        recomputed: the unit whose module has returned last; None when a backward begins.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        config: EngineConfig,
        gather: GatherPipeline,
        reduce: ReducePipeline,
    ) -> None:
        self.units, self.config, self.gather, self.reduce = units, config, gather, reduce
        self.running, self.accumulates, self.late_seen = False, True, False
        self.recomputed: Unit | None = None
        inner = [unit.ordinal for unit in units[:-1]]
        self.completed = [*inner[:0:-1], units[-1].ordinal, *inner[:1]]
        self._done: set[int] = set()
        self._around: frozenset[int] = frozenset()
        self._fired: Counter[int] = Counter()
        self._at_the_end = self._is_last = self._is_known_last = False

    def begin(
        self, accumulates: bool, is_last: bool, is_known_last: bool, several: bool
    ) -> None:
        """The first gradient arrives. is_last, is_known_last: as of
        `ReducePipeline.backward_done`; several: the backward may be that of several forwards."""
        self._start(accumulates, is_last, is_known_last, several)
        root = self.units[-1]
        if root.groups:
            self.gather.need(root)
        self.reduce.backward_begins(root, accumulates)

    def begin_parts(self, is_last: bool, is_known_last: bool) -> None:
        """Begins a backward whose parts a schedule calls; it opens and completes units itself."""
        self._start(True, is_last, is_known_last, several=False)

    def _start(
        self, accumulates: bool, is_last: bool, is_known_last: bool, several: bool
    ) -> None:
        self.running, self.accumulates = True, accumulates
        self._is_last, self._is_known_last = is_last, is_last and is_known_last
        self.recomputed = None
        # Kept gradients can be reduced only once: then their units are completed at its end.
        self._at_the_end = accumulates and is_last and (several or self.late_seen)
        self._fired.clear()
        self._done.clear()
        # Units whose forward goes on after this backward, which runs inside of it.
        self._around = frozenset([unit.ordinal for unit in self.units if unit.busy])
        if accumulates:
            self.completed = []
            self.gather.updates.begin_backward()

    def reach(self, unit: Unit) -> None:
        """The first gradient of a unit's output arrives."""
        if unit.backward_reads_weights:
            self.gather.need(unit)
            unit.busy = True
        self.opens(unit)

    def opens(self, unit: Unit) -> None:
        """Gradients of the unit's weights come next."""
        self.reduce.backward_begins(unit, self.accumulates)

    def recomputes(self, unit: Unit) -> None:
        """`unit`'s module is called again. Of units inside one that is recomputed (the parts of a
        large layer) the one before it is resharded: its backward comes after `unit`'s."""
        before, self.recomputed = self.recomputed, None
        if before is not None and before is not unit and before.inside and not before.busy:
            self.gather.release(before)

    def inputs_done(self, unit: Unit) -> None:
        """All gradients of one call of a unit are known. A unit that was called several times in
        forward is done after as many."""
        unit.check_gathered()
        self._fired[unit.ordinal] += 1
        waits = self._at_the_end and not unit.reduces_each
        if self._fired[unit.ordinal] == unit.forward_calls and not waits:
            self.complete(unit)

    def end(self) -> None:
        """Completes the units whose inputs needed no gradient or that were not reached, and those
        to which gradients came later, in the same order on all ranks. They come late where part of
        the graph between a weight and the loss is older than the call of the unit (autocast keeps
        casts), or a unit ran more often than was counted."""
        for unit in reversed(self.units) if self.accumulates else ():
            if unit.ordinal not in self._done:
                self.complete(unit)
            elif any(group.has_grads() for group in unit.trainable_groups):
                self._complete_late(unit)
        self.gather.release_all(but=self._around)
        self.running = False

    def complete(self, unit: Unit) -> None:
        """All gradients of the unit are there."""
        if self.accumulates and unit.ordinal not in self._done:
            self.completed.append(unit.ordinal)
        self._done.add(unit.ordinal)
        if unit.ordinal not in self._around:
            unit.busy = False
            self.gather.release_used(unit)
        if not self.accumulates:
            return
        # A unit that reduces some gradients in each backward gives its bucket to the next.
        more = self._at_the_end and unit.reduces_each
        if torch.is_grad_enabled():  # a backward with `create_graph`, or none
            with torch.no_grad():
                self.reduce.backward_done(unit, self._is_last, self._is_known_last, more)
        else:
            self.reduce.backward_done(unit, self._is_last, self._is_known_last, more)

    def _complete_late(self, unit: Unit) -> None:
        if not unit.keeps_grads:
            self.complete(unit)
            return
        with torch.no_grad():
            self.late_seen |= self.reduce.reduce_late_grads(unit)
