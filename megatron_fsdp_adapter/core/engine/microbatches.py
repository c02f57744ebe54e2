"""The last backward of a step, and what ends the step: a loop sets this."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from .step import Last
from .unit import Unit


class Microbatches:
    """Base class of the engine."""

    units: list[Unit]
    """In module order."""

    def __init__(self) -> None:
        self.is_last = Last.UNKNOWN  # whether the next backward is the last one of its step
        self.is_last_after_no_sync = Last.YES  # the same of the one after `no_sync`, if unknown
        self.auto_sync = False  # whether the last backward of a step also finishes its gradients

    def microbatch(self, last: bool) -> None:
        """Sets whether the next backwards are the last ones of their steps."""
        self.is_last = Last.YES if last else Last.NO

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """A context for backwards that are not the last one of their step."""
        before = self.is_last
        self.is_last = Last.NO
        try:
            yield
        finally:
            self.is_last = self.is_last_after_no_sync if before is Last.UNKNOWN else before

    def set_auto_sync(self, auto_sync: bool) -> None:
        """Sets whether the last backward of a step also finishes its gradients."""
        self.auto_sync = auto_sync

    @property
    def ends_by_itself(self) -> bool:
        """True if a backward that ends now finishes gradients of the step, or of some units."""
        some_reduce = any(unit.gives_grads for unit in self.units)
        return self.auto_sync and (some_reduce or self.is_last is not Last.NO)
