"""An optimizer whose weights and state are in host memory, updated on the device unit by unit.

    load       1 | 2     | 3     | 4 ...        from host memory
    update         step 1| step 2| step 3 ...   the inner optimizer, on the twins of one unit
    store                | 1     | 2     | ...  to host memory
    compute    backward  | forward 1 ...

It is the step of `late_optimizer.py`, with copies around it. Twins of two units exist at once: what
is loaded next takes the memory of the unit that has been stored. The first two are loaded when a
step's backwards are over, while gradients are reduced and their norm is taken.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..checkpoint.chunks import dtensor_like
from ..core.engine.engine import FsdpEngine
from ..core.engine.group import ParamGroup
from ..core.engine.identity import ParamPair
from ..core.engine.offloaded import OffloadedBuffer
from ..core.engine.updates import LateUpdates
from ..core.runtime.device import COMPUTE, LOAD, STORE, UPDATE
from .late_optimizer import LateShards, Stage
from .local_optimizer import LocalShards, complete_empty_state
from .made_state import is_torch_class, make_state
from .shown_state import Entry, is_like, shown

OPTION = "chunked_optimizer_state_offload"

CHUNKS = 2
"""Units whose twins may exist at once: one that is updated or stored, one that is loaded."""


class StreamedShards(LateShards):
    """The twins behind an inner optimizer's DTensor parameters, and where their state is.

    Args:
        engines: those of the parameters, with `offload`.

    Raises:
        ValueError: the optimizer has state already, or is no Adam.
    """

    option, role = OPTION, UPDATE

    def __init__(
        self, engines: Sequence[FsdpEngine], optimizer: Any, skip_empty: bool, decoupled: bool
    ) -> None:
        self._pairs = {id(pair.optimizer): pair for engine in engines for pair in engine.pairs}
        self._host: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        kind = type(optimizer)
        adam = issubclass(kind, torch.optim.Adam) if is_torch_class(kind) else True
        if not adam or "betas" not in optimizer.defaults or len(optimizer.state) > 0:
            raise ValueError(
                f"{OPTION}=True with optimizer={kind.__name__}: it is for Adam and AdamW, torch's "
                "or fused ones, that have taken no step yet; use one of those, or set it to False"
            )
        super().__init__(engines, optimizer, skip_empty, decoupled)

    def local_of(self, param: Any) -> torch.Tensor:
        pair = self._pairs[id(param)]
        return pair.group.device_items[pair.index]

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
        self._join()
        if self.skip_empty:
            complete_empty_state(self, optimizer)
        self.leave(optimizer)

    def _moved(self, group: ParamGroup, pairs: Sequence[ParamPair]) -> list[OffloadedBuffer]:
        """Puts the state of a group's parameters that has their shape into host memory."""
        buffers: dict[str, OffloadedBuffer] = {}
        for pair in pairs:
            local = group.device_items[pair.index]
            for name, value in self.state.get(local, {}).items():
                if not is_like(value, local):
                    continue
                if name not in buffers:
                    buffers[name] = group.offloaded(value.dtype)
                buffers[name].host_items[pair.index].copy_(value)
                self.state[local][name] = buffers[name].twin_items[pair.index]
                kept = self._host.setdefault(local, {})
                kept[name] = buffers[name].host_items[pair.index]
        return list(buffers.values())

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

    def _walk_begins(self) -> None:
        self._runtime.wait(LOAD, self._runtime.record(COMPUTE))

    def _make_ready(self, number: int) -> None:
        for coming in self._order[number : number + CHUNKS]:
            self._load(coming)
        self._runtime.wait(UPDATE, self._order[number].loaded)

    def _was_queued(self, stage: Stage) -> None:
        def store() -> None:
            for buffer in stage.buffers:
                buffer.store()

        self._runtime.wait(STORE, stage.unit.updated)
        self._runtime.submit(STORE, store)
        stage.loaded, self._last = None, self._runtime.record(STORE)
        self._runtime.wait(LOAD, self._last)
        self._runtime.submit(LOAD, functools.partial(_release, stage))

    def load_ahead(self, of: LateUpdates, after: Any) -> None:
        """When the last of several model chunks is told."""
        last = self._engines[-1].gather.updates
        if of is not last or not self._may_be_late() or self._walking:
            return
        self._plan_order()
        self._runtime.wait(LOAD, after)
        for stage in self._order[:CHUNKS]:
            self._load(stage)

    def drop_loads(self) -> None:
        for stage in self._order:
            if stage.loaded is not None:
                stage.loaded = None
                self._runtime.submit(LOAD, functools.partial(_release, stage))

    def settle(self) -> None:
        super().settle()
        if not self._walking:
            self._drop_loaded()

    def _drop_loaded(self) -> None:
        """What is in host memory may be written now."""
        ahead = [stage.loaded for stage in self._order if stage.loaded is not None]
        if ahead:
            self._runtime.block(ahead[-1])
            self.drop_loads()

    def _wait_for_last(self) -> None:
        """The host, too, reads what was stored."""
        self._runtime.block(self._last)

    def _give_up(self) -> None:
        super()._give_up()
        for stage in self._stages:
            stage.loaded = None
            self._runtime.submit(LOAD, functools.partial(_release, stage))

    def _load(self, stage: Stage) -> None:
        if stage.loaded is not None:
            return

        def load() -> None:
            for buffer in stage.buffers:
                buffer.load()

        self._runtime.submit(LOAD, load)
        stage.loaded = self._runtime.record(LOAD)


def shards_over(
    engines: Sequence[FsdpEngine], late: bool = False
) -> Callable[[Any, bool, bool], LocalShards]:
    """What makes the shards of an optimizer over the parameters of `engines`, which are offloaded
    all or none. ValueError if some are. late: a step on the device may go on behind its return,
    as that of an offloaded one does anyway."""
    wanted = {engine.config.offload for engine in engines}
    if len(wanted) > 1:
        raise ValueError(
            f"{OPTION}: it is True for some of the models of this optimizer; set it for all or none"
        )
    if wanted == {True}:
        return functools.partial(StreamedShards, engines)
    return functools.partial(LateShards, engines) if late else LocalShards


def _release(stage: Stage) -> None:
    for buffer in stage.buffers:
        buffer.twin.release()
