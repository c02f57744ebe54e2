"""The place of main weights and state between steps: on the device, or in host memory, from where
they are updated unit by unit.

    load       1 | 2     | 3     | 4 ...        from host memory
    update         step 1| step 2| step 3 ...   the inner optimizer, on one unit's device buffers
    store                | 1     | 2     | ...  to host memory
    gather                 gather 1 | gather 2 ...
    compute    backward | norm | forward 1 ...

A step of the inner optimizer becomes one for each unit, on that unit's tensors alone. Adam works
element by element, so each number is what one step on all of them gives. Units are updated in the
order of a forward pass, and a step returns once all of this has been queued. The next forward runs
meanwhile, and waits for its units one by one (`DeferredUpdates`). What a step reads on the host,
learning rates and counts of steps, it reads before it returns. Gradients are clipped with their
unit's update.

Buffers of two units exist at once: what is loaded next takes the memory of the unit that has been
stored. The loads of the first two are queued when a step's backwards have been, and run while
gradients are reduced and their norm is taken.

In a loop of the user's own, which may read main weights as soon as a step returns, and where
quantized weights are made of all of them at once, a step waits until everything is over.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..core.engine.buffer import ShardedBuffer
from ..core.engine.engine import FsdpEngine
from ..core.engine.group import ParamGroup
from ..core.engine.params import ParamPair
from ..core.engine.unit import DeferredUpdates, Unit
from ..core.runtime.device import COMPUTE, LOAD, STORE, UPDATE
from .state import ADAM, StateEntry, is_like, make_state, moments_of

OFFLOAD_OPTION = "chunked_optimizer_state_offload"

CHUNKS = 2
"""Units whose device buffers may exist at once: one is updated or stored, one is loaded."""

LocalPair = tuple[Any, torch.Tensor]
"""A sharded parameter, and what the inner optimizer updates in its place."""


@dataclass
class Part:
    """One unit's part of a step."""

    unit: Unit
    # The updates of its engine.
    updates: DeferredUpdates
    # What is updated, by parameter group of the optimizer.
    pairs: list[list[LocalPair]]
    # The engine's groups that these are in.
    groups: list[ParamGroup]
    # What is loaded and stored.
    buffers: list[ShardedBuffer] = field(default_factory=list)
    # The event of its load; None while nothing is loaded.
    loaded: Any = None

    def give_to(self, optimizer: Any) -> None:
        """Makes the unit's parameters those of the inner optimizer."""
        for group, pairs in zip(optimizer.param_groups, self.pairs, strict=True):
            group["params"] = [local for _, local in pairs]


class Residency:
    """The place of the main weights and the state of one optimizer.

    Args:
        engines: those of the parameters. Main weights and state are in host memory, if that is
            what they are configured for.
        readers_ask: whether all readers of what a step writes ask the engine first, so that the
            step may return before its updates are over.

    Raises:
        ValueError: some engines are configured for host memory and some are not; or all are, and
            the optimizer has state already, or is no Adam.
    """

    def __init__(
        self, engines: Sequence[FsdpEngine], optimizer: Any, readers_ask: bool = True
    ) -> None:
        offloads = {engine.config.offload for engine in engines}
        if len(offloads) > 1:
            raise ValueError(
                f"{OFFLOAD_OPTION}: True for some models of this optimizer, False for others. "
                "Set it for "
                "all of them or for none"
            )
        if offloads != {True}:
            engines = ()
        self._engines = engines
        # Whether main weights and state are in host memory.
        self.on_host = bool(engines)
        # By the id of a parameter whose main weights are in host memory: what is updated instead.
        self.device_items: dict[int, torch.Tensor] = {}
        # By local tensor: the part of its state that is in host memory.
        self.tensors: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        # The parts of a step, planned once.
        self.parts: list[Part] = []
        # The same, in the order of the step that is under way or that loads have begun for.
        self._order: list[Part] = []
        # The event of the last store that the host has not waited for.
        self._last_store: Any = None
        copies_grads = False  # copies are freed when the step returns, maybe before they are read
        reads_any_dtype = hasattr(optimizer, "use_decoupled_grad")
        for engine in engines:
            for pair in engine.pairs:
                items = pair.group.main.device_buffer.items(pair.group.shards.held)
                self.device_items[id(pair.sharded)] = items[pair.index]
                other_dtype = pair.grad is not None and pair.grad.dtype != pair.sharded.dtype
                copies_grads |= other_dtype and not reads_any_dtype
        is_quantized = any(engine.quantization for engine in engines)
        # Whether a step may return before its updates are over.
        self.may_be_late = readers_ask and not is_quantized and not copies_grads
        if not engines:
            return
        self._runtime = engines[0].runtime
        if moments_of(optimizer) != ADAM or len(optimizer.state) > 0:
            raise ValueError(
                f"{OFFLOAD_OPTION}=True with optimizer={type(optimizer).__name__}: supports "
                "only Adam and "
                "AdamW, of torch or fused, that have taken no step yet. Use one of those, or set "
                "it to False"
            )

    def plan(
        self,
        optimizer: Any,
        groups: Sequence[Sequence[LocalPair]],
        skip_empty: bool,
        state: Mapping[torch.Tensor, StateEntry],
    ) -> None:
        """Makes all state now, one unit at a time, and moves it to host memory. Called while the
        optimizer has local tensors.

        groups: the pairs of each parameter group. skip_empty: leaves out empty shards. state: by
        local tensor, written by `optimizer`."""
        group_of = {id(param): index for index, pairs in enumerate(groups) for param, _ in pairs}
        for engine in self._engines:
            for unit in engine.units:
                found = [
                    pair
                    for pair in engine.pairs
                    if pair.group in unit.groups and id(pair.sharded) in group_of
                ]
                updated: list[list[LocalPair]] = [[] for _ in groups]
                for pair in found:
                    param = pair.sharded
                    local = self.device_items[id(param)]
                    if local.numel() > 0 or not skip_empty:
                        updated[group_of[id(param)]].append((param, local))
                if not any(updated):
                    continue
                unit_groups = list(dict.fromkeys(pair.group for pair in found))
                part = Part(unit, engine.gather.updates, updated, unit_groups)
                part.give_to(optimizer)
                make_state(optimizer)
                mains = [group.main.device_buffer for group in unit_groups if group.main.is_on_host]
                part.buffers = [*mains, *self._move_state(found, state)]
                self.parts.append(part)
            engine.gather.updates.join(self)

    def _move_state(
        self, pairs: Sequence[ParamPair], state: Mapping[torch.Tensor, StateEntry]
    ) -> Iterable[ShardedBuffer]:
        """Moves the state that has its parameter's shape to host memory. Returns its buffers, one
        for each name and each of the engine's groups."""
        buffers: dict[tuple[ParamGroup, str], ShardedBuffer] = {}
        for pair in pairs:
            local = self.device_items[id(pair.sharded)]
            group = pair.group
            own = state.get(local, {})
            for name, value in own.items():
                if not is_like(value, local):
                    continue
                if (group, name) not in buffers:
                    buffers[group, name] = group.shards.offloaded(value.dtype)
                on_device = buffers[group, name]
                on_host: Any = on_device.host
                stored = on_host.items(group.shards.held)[pair.index]
                stored.copy_(value)
                own[name] = on_device.items(group.shards.held)[pair.index]
                self.tensors.setdefault(local, {})[name] = stored
        return buffers.values()

    def state_to_write(self, local: torch.Tensor) -> dict[str, torch.Tensor]:
        """The part of the state of `local` that is in host memory, to be written. What was loaded
        ahead is dropped, as it would be old then."""
        self._wait_and_drop_loads()
        return self.tensors.get(local, {})

    # A step.

    def run(self, update: Callable[[Part], None]) -> None:
        """Queues the load, the update and the store of each part, in the order of the next forward.
        On CUDA the host waits for none of them."""
        runtime = self._runtime
        self._plan_order()
        # Updates read gradients that compute has queued, and loads read host memory that it may
        # still write. Loads that began ahead were queued before and do not wait here.
        for role in (LOAD, UPDATE):
            runtime.wait(role, runtime.record(COMPUTE))
        for number, part in enumerate(self._order):
            self._load(self._order[number : number + CHUNKS])
            runtime.wait(UPDATE, part.loaded)
            runtime.submit(UPDATE, functools.partial(update, part))
            updated = runtime.record(UPDATE)
            part.updates.queued(part.unit, updated)
            runtime.wait(STORE, updated)
            runtime.submit(STORE, *(buffer.store for buffer in part.buffers))
            self._last_store = runtime.record(STORE)
            # What is loaded next takes the memory of this part.
            runtime.wait(LOAD, self._last_store)
            self._release([part])

    def _plan_order(self) -> None:
        """Sets the order of parts: that of the next forward as far as it is known, then the others.
        An order that loads have begun for stays."""
        if any(part.loaded is not None for part in self._order):
            return
        by_unit = {id(part.unit): part for part in self.parts}
        order = []
        for engine in self._engines:
            ordinals = [*engine.order.forward(), *range(len(engine.units))]
            for ordinal in dict.fromkeys(ordinals):
                part = by_unit.get(id(engine.units[ordinal]))
                if part is not None:
                    order.append(part)
        self._order = order

    def _load(self, parts: Sequence[Part]) -> None:
        """Loads parts that are not loaded yet."""
        for part in parts:
            if part.loaded is None:
                self._runtime.submit(LOAD, *(buffer.load for buffer in part.buffers))
                part.loaded = self._runtime.record(LOAD)

    def _release(self, parts: Sequence[Part]) -> None:
        """Gives back the device memory of parts, on the role that takes it again."""
        for part in parts:
            part.loaded = None
            self._runtime.submit(LOAD, *(buffer.release for buffer in part.buffers))

    def give_up(self) -> None:
        """Ends a step that has raised: waits for what is queued, and releases device buffers. The
        updates of some units are then missing, as after any such step."""
        if not self.on_host:
            return
        self._runtime.synchronize()
        self.finish_updates()
        self._release(self.parts)

    def finish_updates(self) -> None:
        """Waits on the host for the last store, and orders the compute stream behind updates."""
        if self._last_store is None:
            return
        self._runtime.block(self._last_store)
        self._last_store = None
        for engine in self._engines:
            engine.gather.updates.order_compute()

    def _wait_and_drop_loads(self) -> None:
        """Waits on the host for loads, and drops them: values in host memory may be written now."""
        ahead = [part.loaded for part in self._order if part.loaded is not None]
        if ahead:
            self._runtime.block(ahead[-1])
            self.drop_loads()

    # Calls of the engine (`DeferredUpdates`).

    def load_ahead(self, of: DeferredUpdates, after: Any) -> None:
        """Begins to load for the next step, behind the event `after`, when the last of several
        model chunks calls."""
        is_last = of is self._engines[-1].gather.updates
        if is_last and self.may_be_late:
            self._plan_order()
            self._runtime.wait(LOAD, after)
            self._load(self._order[:CHUNKS])

    def drop_loads(self) -> None:
        """Releases the buffers of parts that are loaded."""
        self._release([part for part in self._order if part.loaded is not None])

    def settle(self) -> None:
        """Makes main weights and state readable and writable on the compute stream and the host:
        nothing is loaded then."""
        self.finish_updates()
        self._wait_and_drop_loads()
