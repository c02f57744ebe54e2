"""An optimizer whose weights and state are in host memory, updated on the device unit by unit.

    load       1 | 2     | 3     | 4 ...        from host memory
    update         step 1| step 2| step 3 ...   the inner optimizer, on one unit's device buffers
    store                | 1     | 2     | ...  to host memory
    gather                 gather 1 | gather 2 ...
    compute    backward | norm | forward 1 ...

A step of the inner optimizer becomes one for each unit, on that unit's tensors alone. Adam works
element by element, so each number is what one step on all of them gives. Units are updated in the
order of a forward pass, and a step returns when all that is queued: the next forward runs
meanwhile, and waits for its units one by one (`core/engine/deferred_updates.py`). What a step
reads on the host, learning rates and counts of steps, it reads before it returns. Gradients are
clipped with their unit's update.

Twins of two units exist at once: what is loaded next takes the memory of the unit that has been
stored. The first two are loaded when a step's backwards are over, while gradients are reduced and
their norm is taken.

In a loop of the user's own, which may read main weights as soon as a step returns, and where
quantized weights are made of all of them at once, a step waits until everything is over.

It hangs on the hook in front of a step that shards hang on anyway: all units are stepped there, and
the step that was asked for finds groups without parameters. An optimizer around the inner one was
turned down: learning rate schedulers, Megatron and users know the inner one by its class and by its
groups.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..checkpoint.chunks import dtensor_like
from ..core.engine.deferred_updates import DeferredUpdates
from ..core.engine.engine import FsdpEngine
from ..core.engine.group import ParamGroup
from ..core.engine.identity import ParamPair
from ..core.engine.offloaded import OffloadedBuffer
from ..core.engine.unit import Unit
from ..core.runtime.device import COMPUTE, LOAD, STORE, UPDATE
from .local_optimizer import Clip, LocalPair, LocalShards, complete_empty_state
from .partial_steps import Options, options_of, plain_step, set_options, steps_in_steps
from .state_init import is_torch_class, make_state
from .state_view import Entry, is_like, shown

OPTION = "chunked_optimizer_state_offload"

CHUNKS = 2
"""Units whose device buffers may exist at once: one is updated or stored, one is loaded."""


@dataclass
class Stage:
    """One unit's part of a step. updates: of its engine; pairs: sharded parameters, and what the
    inner optimizer is given for them, by parameter group; groups: the engine's; buffers: what is
    loaded and stored; loaded: an event, from the load on until the update is queued."""

    unit: Unit
    updates: DeferredUpdates
    pairs: list[list[LocalPair]]
    groups: list[ParamGroup]
    buffers: list[OffloadedBuffer] = field(default_factory=list)
    loaded: Any = None

    def load(self) -> None:
        for buffer in self.buffers:
            buffer.load()

    def store(self) -> None:
        for buffer in self.buffers:
            buffer.store()

    def release(self) -> None:
        for buffer in self.buffers:
            buffer.device_buffer.release()


class StreamedShards(LocalShards):
    """The device buffers behind an inner optimizer's DTensor parameters, and where their state is.
    They are updated unit by unit, and may be when a step has returned.

    Args:
        engines: those of the parameters, with `offload`.
        asks: whether all readers of what a step writes ask the engine first, so that the step may
            return before its updates are over.

    Raises:
        ValueError: the optimizer has state already, or is no Adam.
    """

    def __init__(
        self, engines: Sequence[FsdpEngine], asks: bool, optimizer: Any, skip_empty: bool,
        decoupled: bool,
    ) -> None:
        self._engines, self._runtime = engines, engines[0].runtime
        self._asks = asks and not any(engine.quantization for engine in engines)
        self._pairs = {id(pair.sharded): pair for engine in engines for pair in engine.pairs}
        self._host: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        self._stages: list[Stage] = []
        self._order: list[Stage] = []
        self._walking = False
        self._last: Any = None
        self._results: dict[int, Options] = {}
        kind = type(optimizer)
        adam = issubclass(kind, torch.optim.Adam) if is_torch_class(kind) else True
        if not adam or "betas" not in optimizer.defaults or len(optimizer.state) > 0:
            raise ValueError(
                f"{OPTION}=True with optimizer={kind.__name__}: it is for Adam and AdamW, torch's "
                "or fused ones, that have taken no step yet; use one of those, or set it to False"
            )
        super().__init__(optimizer, skip_empty, decoupled)

    def local_of(self, param: Any) -> torch.Tensor:
        pair = self._pairs[id(param)]
        return pair.group.device_main.items(pair.group.held)[pair.index]

    # State.

    def adopted(self, optimizer: Any) -> None:
        """Makes all state now, one unit at a time, and moves it to host memory."""
        self.enter(optimizer)
        for stage, pairs in self._planned():
            self._show(optimizer, stage)
            make_state(optimizer)
            for group in stage.groups:
                if group.staged is not None:
                    stage.buffers.append(group.staged)
            for group in stage.groups:
                own = [pair for pair in pairs if pair.group is group]
                stage.buffers += self._moved(group, own)
            self._stages.append(stage)
        for engine in self._engines:
            engine.gather.updates.join(self)
        if self.skip_empty:
            complete_empty_state(self, optimizer)
        self.leave(optimizer)

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
                    if pair.group in unit.groups and id(pair.sharded) in where
                ]
                pairs: list[list[LocalPair]] = [[] for _ in self.pairs]
                for pair in found:
                    index, local = where[id(pair.sharded)]
                    if local.numel() > 0 or not self.skip_empty:
                        pairs[index].append((pair.sharded, local))
                groups = list(dict.fromkeys(pair.group for pair in found))
                if any(pairs):
                    yield Stage(unit, engine.gather.updates, pairs, groups), found

    def _moved(self, group: ParamGroup, pairs: Sequence[ParamPair]) -> list[OffloadedBuffer]:
        """Puts the state of a group's parameters that has their shape into host memory."""
        buffers: dict[str, OffloadedBuffer] = {}
        for pair in pairs:
            local = group.device_main.items(group.held)[pair.index]
            for name, value in self.state.get(local, {}).items():
                if not is_like(value, local):
                    continue
                if name not in buffers:
                    buffers[name] = group.offloaded(value.dtype)
                buffers[name].host.items(group.held)[pair.index].copy_(value)
                self.state[local][name] = buffers[name].device_buffer.items(group.held)[pair.index]
                kept = self._host.setdefault(local, {})
                kept[name] = buffers[name].host.items(group.held)[pair.index]
        return list(buffers.values())

    def regroup(self, optimizer: Any) -> None:
        if self._stages:
            raise ValueError(
                f"add_param_group with {OPTION}, or param_groups with other parameters: units are "
                "planned when the optimizer is sharded; make it with all of its groups, or freeze "
                "parameters by a learning rate of 0"
            )
        super().regroup(optimizer)

    def made_state(self, optimizer: Any) -> None:
        """What has none gets it now: in a step it would be memory of another stream."""
        make_state(optimizer)

    def shown_state(self, param: Any, local: torch.Tensor, state: Entry) -> Entry:
        """Tensors in host memory, as DTensors."""
        host = self._host.get(local, {})
        kept = {name: dtensor_like(param, host[name]) for name in state if name in host}
        rest = {name: value for name, value in state.items() if name not in host}
        return {**shown(param, local, rest), **kept}

    def put(self, param: Any, name: str, value: Any) -> None:
        """Into host memory."""
        local = self.local_of(param)
        if name not in self.state[local]:
            raise ValueError(
                f"optimizer state {name} of a parameter of shape {tuple(param.shape)}: this "
                f"optimizer has none of that name, and with {OPTION} none can be added; load what "
                "was saved from an optimizer of the same kind"
            )
        host = self._host.get(local, {}).get(name)
        if host is None:
            self.state[local][name] = value
        else:
            self._drop_loaded()
            host.copy_(value)

    def drop(self, param: Any, names: Sequence[str]) -> None:
        """Zeros: no step makes state here."""
        local = self.local_of(param)
        for name in names:
            self._drop_loaded()
            value = self._host.get(local, {}).get(name, self.state[local][name])
            value.zero_()

    def state_storages(self) -> list[torch.Tensor]:
        """None: it is in host memory already."""
        return []

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
        """Whether a step may return before its updates are over: nothing is lost with the step."""
        return self._asks and not self.copies_grads

    def _walk(self, optimizer: Any) -> None:
        at_start = [options_of(group) for group in optimizer.param_groups]
        runtime = self._runtime
        self._plan_order()
        for role in (LOAD, UPDATE):
            runtime.wait(role, runtime.record(COMPUTE))
        for number, stage in enumerate(self._order):
            for coming in self._order[number : number + CHUNKS]:
                self._load(coming)
            runtime.wait(UPDATE, stage.loaded)
            runtime.submit(UPDATE, functools.partial(self._update, optimizer, stage, at_start))
            stage.updates.queued(stage.unit, runtime.record(UPDATE))
            runtime.wait(STORE, stage.unit.updated)
            runtime.submit(STORE, stage.store)
            stage.loaded, self._last = None, runtime.record(STORE)
            runtime.wait(LOAD, self._last)
            runtime.submit(LOAD, stage.release)
        for group, options in zip(optimizer.param_groups, at_start, strict=True):
            set_options(group, options)

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
            own.write_own_from_device()
        for index, group in enumerate(optimizer.param_groups):
            if stage.pairs[index]:
                self._results[index] = options_of(group)

    def _show(self, optimizer: Any, stage: Stage) -> None:
        """Gives the inner optimizer one unit's parameters."""
        for group, pairs in zip(optimizer.param_groups, stage.pairs, strict=True):
            group["params"] = [local for _, local in pairs]

    def load_ahead(self, of: DeferredUpdates, after: Any) -> None:
        """Loads when the last of several model chunks calls."""
        last = self._engines[-1].gather.updates
        if of is not last or not self._may_be_late() or self._walking:
            return
        self._plan_order()
        self._runtime.wait(LOAD, after)
        for stage in self._order[:CHUNKS]:
            self._load(stage)

    def _load(self, stage: Stage) -> None:
        if stage.loaded is None:
            self._runtime.submit(LOAD, stage.load)
            stage.loaded = self._runtime.record(LOAD)

    def drop_loads(self) -> None:
        for stage in self._order:
            if stage.loaded is not None:
                stage.loaded = None
                self._runtime.submit(LOAD, stage.release)

    def settle(self) -> None:
        self._finish_updates()
        if not self._walking:
            self._drop_loaded()

    def _finish_updates(self) -> None:
        """The host, too, reads what was stored."""
        if self._last is not None:
            self._runtime.block(self._last)
            self._last = None
            for engine in self._engines:
                engine.gather.updates.order_compute()

    def _drop_loaded(self) -> None:
        """What is in host memory may be written now."""
        ahead = [stage.loaded for stage in self._order if stage.loaded is not None]
        if ahead:
            self._runtime.block(ahead[-1])
            self.drop_loads()

    def check(self) -> None:
        super().check()
        if not self._walking:
            self.settle()

    def _give_up(self) -> None:
        """A step has raised: what is on the device is as unfinished as after any such step."""
        self._results, self._clip = {}, None
        self._runtime.synchronize()
        self._finish_updates()
        for stage in self._stages:
            stage.loaded = None
            self._runtime.submit(LOAD, stage.release)

    def leave(self, optimizer: Any) -> None:
        if self._walking:
            return  # the end of a step inside a step
        for index, options in self._results.items():
            optimizer.param_groups[index].update(options)
        self._results = {}
        super().leave(optimizer)


def shards_over(
    engines: Sequence[FsdpEngine], asks: bool = True
) -> Callable[[Any, bool, bool], LocalShards]:
    """What makes the shards of an optimizer over the parameters of `engines`, which are offloaded
    all or none; `asks` as of `StreamedShards`. ValueError if some are."""
    wanted = {engine.config.offload for engine in engines}
    if len(wanted) > 1:
        raise ValueError(
            f"{OPTION}: it is True for some of the models of this optimizer; set it for all or none"
        )
    return functools.partial(StreamedShards, engines, asks) if wanted == {True} else LocalShards
