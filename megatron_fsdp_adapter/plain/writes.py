"""Writes of sharded parameters while passes read gathered weights, which are older then.

A module shows its sharded parameters whenever its unit is not unsharded, so a program may write
them between any two events of a pass. Torch counts the writes of each tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from ..core.engine.params import ParamPair
from ..core.engine.unit import Unit


class WriteCounts:
    """Counts of writes of sharded parameters, as they were when passes began to read them."""

    def __init__(self) -> None:
        # The units of the engine.
        self._units: Sequence[Unit] = ()
        # By ordinal of a unit, its pairs, and the sharded parameters of these.
        self._pairs: list[list[ParamPair]] = []
        self._params: list[list[nn.Parameter]] = []
        # By ordinal, the counts of these; None while no pass reads gathered weights.
        self._counts: list[list[int]] | None = None

    def watch(self, units: Sequence[Unit], pairs: Sequence[ParamPair]) -> None:
        """Sets whose parameters are looked at."""
        self._units = units
        self._pairs = [[pair for pair in pairs if pair.group in unit.groups] for unit in units]
        self._params = [[pair.sharded for pair in own] for own in self._pairs]

    @property
    def are_counted(self) -> bool:
        """True if passes read gathered weights: writes since they began are known."""
        return self._counts is not None

    def begin(self) -> None:
        """Takes all writes so far for known."""
        self._counts = [_counts_of(params) for params in self._params]

    def end(self) -> None:
        """Forgets the counts: passes read gathered weights no longer."""
        self._counts = None

    def take(self, unit: Unit) -> bool:
        """True if parameters of `unit` were written since the last call. They are known then."""
        if self._counts is None:
            return False
        now = _counts_of(self._params[unit.ordinal])
        if now == self._counts[unit.ordinal]:
            return False
        self._counts[unit.ordinal] = now
        return True

    def refuse_before_backward(self) -> None:
        """RuntimeError if parameters were written that are not known, and a backward begins."""
        if self._counts is None:
            return
        written = []
        for params, pairs, before in zip(self._params, self._pairs, self._counts, strict=True):
            now = _counts_of(params)
            if now == before:
                continue
            for pair, old, new in zip(pairs, before, now, strict=True):
                if old != new and not pair.group.main.is_compute_weight:
                    written.append(pair.managed.fqns[0])
        if written:
            raise RuntimeError(
                f"parameters {written[:4]} were written between a forward and its backward, which "
                "would compute with the new values. Write them before the forward, or after the "
                "backward"
            )


def _counts_of(params: Sequence[nn.Parameter]) -> list[int]:
    return [param._version for param in params]
