"""Updates of weights that go on behind the step that queued them, and what has to wait for them.

    update stream    unit 1 | unit 2   | unit 3 ...
    gather stream             gather 1 | gather 2 ...
    compute stream                       forward 1 ...

A unit's gather waits for the update of that unit. The update reads gradients, so those of a unit
that are forgotten meanwhile keep their memory until the compute stream is behind the unit's gather;
no backward begins before all are over. Readers of main weights or their state wait for all updates.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

from megatron_fsdp_adapter.core.runtime.device import COMPUTE, GATHER, Runtime

from .unit import Unit


class DeferredUpdates:
    """Args:
    units: of one engine.
    """

    def __init__(self, units: Sequence[Unit], runtime: Runtime) -> None:
        self._units, self._runtime = units, runtime
        self._updaters: list[weakref.ref[Any]] = []
        self._began: Any = None
        self._last: Any = None

    def join(self, updater: Any) -> None:
        """Adds an updater of some units (`optim/residency.py`), on a stream of its own. Its methods
        `load_ahead`, `drop_loads` and `settle` are called by those of the same names here. It is
        not kept alive."""
        self._updaters.append(weakref.ref(updater))

    def queued(self, unit: Unit, event: Any) -> None:
        """The update of a unit, which reads its gradients, is over when `event` has happened, and
        so are those that were queued before it."""
        self._last = unit.updated = event
        unit.behind_update = False
        for group in unit.trainable_groups:
            group.is_read = True

    def begin_backward(self) -> None:
        """Gradients may be written from here on."""
        self.order_compute()
        if self._updaters:
            self._began = self._runtime.record(COMPUTE)

    def order_compute(self) -> None:
        """Orders the compute stream behind all updates, and the gathers that are launched next."""
        if self._last is None:
            return
        for role in (COMPUTE, GATHER):
            self._runtime.wait(role, self._last)
        self._last = None
        for unit in self._units:
            if unit.updated is not None:
                unit.update_passed()

    def load_ahead(self) -> None:
        """All gradients of a step are on their way: what the first updates need is loaded once the
        last backward has begun, as host memory is final then."""
        if self._began is not None:
            for updater in self._alive():
                updater.load_ahead(self, self._began)

    def drop_loads(self) -> None:
        """Drops what was loaded ahead, because main weights or state may have been written, or no
        step follows."""
        self._began = None
        for updater in self._alive():
            updater.drop_loads()

    def settle(self) -> None:
        """Main weights and state may be read and written after this, on the compute stream, and by
        the host where they are in its memory."""
        for updater in self._alive():
            updater.settle()

    def _alive(self) -> Iterator[Any]:
        return (one for one in (ref() for ref in self._updaters) if one is not None)
