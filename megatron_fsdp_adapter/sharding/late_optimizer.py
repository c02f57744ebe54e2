"""An optimizer whose step goes on, unit by unit, under the next forward.

    beside     update 1 | update 2 | update 3 ...      the inner optimizer, on one unit's shards
    gather                gather 1 | gather 2 ...
    compute    backward | norm | forward 1 ...

A step of the inner optimizer becomes one for each unit, on that unit's tensors alone. Adam and SGD
work element by element, so each number is what one step on all of them gives. Units are updated in
the order of a forward pass, and a step returns when all that is queued: the next forward runs
meanwhile, and waits for its units one by one (`core/engine/updates.py`). What a step reads on the
host, learning rates and counts of steps, it reads before it returns. Gradients are clipped with
their unit's update.

Where the user writes the loop, who may read main weights as soon as a step returns, and where
quantised weights are made of all of them at once, a step waits until everything is over.

It hangs on the hook in front of a step that shards hang on anyway: all units are stepped there, and
the step that was asked for finds groups without parameters. An optimizer around the inner one was
turned down: learning rate schedulers, Megatron and users know the inner one by its class and by its
groups.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..core.engine.engine import FsdpEngine
from ..core.engine.group import ParamGroup
from ..core.engine.identity import ParamPair
from ..core.engine.offloaded import OffloadedBuffer
from ..core.engine.unit import Unit
from ..core.engine.updates import LateUpdates
from ..core.runtime.device import BESIDE, COMPUTE
from .local_optimizer import Clip, LocalPair, LocalShards, initialize_state
from .made_state import make_state
from .partial_steps import Options, options_of, plain_step, set_options, steps_in_steps

OPTION = "fsdp_overlap_param_gather_with_optimizer_step"

@dataclass
class Stage:
    """One unit's part of a step. updates: of its engine; pairs: optimizer parameters, and what the
    inner optimizer is given for them, by parameter group; groups: the engine's. Of those in host
    memory, buffers: what is loaded and stored; loaded: an event, from the load on until the update
    is queued."""

    unit: Unit
    updates: LateUpdates
    pairs: list[list[LocalPair]]
    groups: list[ParamGroup]
    buffers: list[OffloadedBuffer] = field(default_factory=list)
    loaded: Any = None


class LateShards(LocalShards):
    """Shards that are updated unit by unit, and may be when a step has returned.

    Args:
        engines: those of the parameters.

    role: what updates run as.
    """

    option, role = OPTION, BESIDE

    def __init__(
        self, engines: Sequence[FsdpEngine], optimizer: Any, skip_empty: bool, decoupled: bool
    ) -> None:
        self._engines, self._runtime = engines, engines[0].runtime
        self._stages: list[Stage] = []
        self._order: list[Stage] = []
        self._walking = False
        self._last: Any = None
        self._results: dict[int, Options] = {}
        super().__init__(optimizer, skip_empty, decoupled)

    # State.

    def adopted(self, optimizer: Any) -> None:
        """Makes all state now: in a step it would be memory of another stream."""
        initialize_state(optimizer)
        self._stages = [stage for stage, _ in self._planned()]
        self._join()

    def _join(self) -> None:
        for engine in self._engines:
            engine.gather.updates.join(self)

    def regroup(self, optimizer: Any) -> None:
        if self._stages:
            raise ValueError(
                f"add_param_group with {self.option}, or param_groups with other parameters: units "
                "are planned when the optimizer is sharded; make it with all of its groups, or "
                "freeze parameters by a learning rate of 0"
            )
        super().regroup(optimizer)

    def made_state(self, optimizer: Any) -> None:
        """What has none gets it now: in a step it would be memory of another stream."""
        for part in self.parts(optimizer):
            make_state(part, self.makes_own)

    def _planned(self) -> Iterable[tuple[Stage, list[ParamPair]]]:
        """The units, in order, that have parameters of this optimizer."""
        where = {
            id(param): (index, local)
            for index, pairs in enumerate(self.pairs)
            for param, local in pairs
        }
        for engine in self._engines:
            for unit in engine.units:
                found = [
                    pair for pair in engine.pairs
                    if pair.group in unit.groups and id(pair.optimizer) in where
                ]
                pairs: list[list[LocalPair]] = [[] for _ in self.pairs]
                for pair in found:
                    index, local = where[id(pair.optimizer)]
                    if local.numel() > 0 or not self.skip_empty:
                        pairs[index].append((pair.optimizer, local))
                groups = list(dict.fromkeys(pair.group for pair in found))
                if any(pairs):
                    yield Stage(unit, engine.gather.updates, pairs, groups), found

    def state_storages(self) -> list[torch.Tensor]:
        self.settle()
        return super().state_storages()

    # A step.

    def takes_clip(self, clip: Clip) -> bool:
        if self.step_follows and self._may_be_late():
            self._clip = clip
        return super().takes_clip(clip)

    def begin(self, optimizer: Any) -> None:
        """Queues the steps of all units; `settle` waits for them. The step that was asked for
        finds nothing left to do."""
        if self._walking or (self._results and steps_in_steps(type(optimizer))):
            return  # a step of a subclass that calls its base's
        self._walking, self._results = True, {}
        try:
            self._finish_updates()
            super().begin(optimizer)
            self._walk(optimizer)
            if not self._may_be_late():
                self._finish_updates()
        except BaseException:
            self._walking = False
            self._give_up()
            self.leave(optimizer)
            raise
        self._walking, self._clip = False, None
        for index, group in enumerate(optimizer.param_groups):
            # Of a group that no unit has, as this rank holds nothing of it, the step that was asked
            # for counts.
            is_over = any(stage.pairs[index] for stage in self._stages)
            group["params"] = [] if is_over else self.given(index)

    def _may_be_late(self) -> bool:
        """Whether a step may return before its updates are over: everybody who reads what they
        write asks the engine first, and nothing is lost with the step."""
        asks = not any(engine.own_loop or engine.quantisation for engine in self._engines)
        return asks and not self.copies_grads

    def _walk(self, optimizer: Any) -> None:
        at_start = [options_of(group) for group in optimizer.param_groups]
        runtime = self._runtime
        self._plan_order()
        self._walk_begins()
        runtime.wait(self.role, runtime.record(COMPUTE))
        for number, stage in enumerate(self._order):
            self._make_ready(number)
            runtime.submit(self.role, functools.partial(self._update, optimizer, stage, at_start))
            self._last = runtime.record(self.role)
            stage.updates.queued(stage.unit, self._last)
            self._was_queued(stage)
        for group, options in zip(optimizer.param_groups, at_start, strict=True):
            set_options(group, options)

    def _walk_begins(self) -> None:
        """No update is queued yet."""

    def _make_ready(self, number: int) -> None:
        """Unit `number` of the order is updated next."""

    def _was_queued(self, stage: Stage) -> None:
        """The update of `stage` is queued."""

    def _plan_order(self) -> None:
        """That of the next forward, as far as it is known; the one that loads have begun with."""
        if any(stage.loaded is not None for stage in self._order):
            return
        by_unit = {id(stage.unit): stage for stage in self._stages}
        units = [
            engine.units[ordinal]
            for engine in self._engines
            for ordinal in dict.fromkeys([*engine.order.forward(), *range(len(engine.units))])
        ]
        self._order = [by_unit[id(unit)] for unit in units if id(unit) in by_unit]

    def _update(self, optimizer: Any, stage: Stage, at_start: Sequence[Options]) -> None:
        for group, options in zip(optimizer.param_groups, at_start, strict=True):
            set_options(group, options)  # fused optimizers count a step in each call
        if self._clip is not None:
            self._clip([pair for pairs in stage.pairs for pair in pairs])
        self._show(optimizer, stage)
        plain_step(optimizer)
        for own in stage.groups:
            own.write_own_from_twin()
        for index, group in enumerate(optimizer.param_groups):
            if stage.pairs[index]:
                self._results[index] = options_of(group)

    def load_ahead(self, of: LateUpdates, after: Any) -> None:
        """Nothing has to be loaded."""

    def drop_loads(self) -> None:
        """Nothing was."""

    def settle(self) -> None:
        self._finish_updates()

    def _finish_updates(self) -> None:
        if self._last is not None:
            self._wait_for_last()
            self._last = None
            for engine in self._engines:
                engine.gather.updates.order_compute()

    def _wait_for_last(self) -> None:
        """Nothing: who reads on the device is behind what the compute stream is behind."""

    def check(self) -> None:
        super().check()
        if not self._walking:
            self.settle()

    def _give_up(self) -> None:
        """A step has raised: what is on the device is as unfinished as after any such step."""
        self._results, self._clip = {}, None
        self._runtime.synchronize()
        self._finish_updates()

    def leave(self, optimizer: Any) -> None:
        if self._walking:
            return  # the end of a step inside a step
        for index, options in self._results.items():
            optimizer.param_groups[index].update(options)
        self._results = {}
        super().leave(optimizer)

    def _show(self, optimizer: Any, stage: Stage) -> None:
        """Gives the inner optimizer one unit's parameters."""
        for group, pairs in zip(optimizer.param_groups, stage.pairs, strict=True):
            group["params"] = [local for _, local in pairs]
