"""Gradients that are unexpectedly large: norms are noted on the device before gradients are
communicated, and given to a judge on the host once a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..core.engine.reduce import GradCheck as Check
from ..core.engine.unit import Unit

Judge = Callable[[str, torch.Tensor], None]
"""Called with the name of a unit and a norm, a 0-dim float32 tensor on the CPU."""


class LargeGradCheck:
    """2-norms of each unit's gradients after each of its backwards.

    Args:
        judge: called at the end of the step with every norm, in the order of the backwards.
    """

    def __init__(self, judge: Judge) -> None:
        self._judge = judge
        self._notes: list[tuple[str, torch.Tensor]] = []

    def note(self, unit: Unit) -> None:
        """Looks at the gradients that `unit`'s backward has just added to its buffers. Where
        microbatches add up in one buffer, it sees their sum so far."""
        held = [
            tensor
            for group in unit.active_groups
            for tensor in group.collected.segments(group.full)
            if tensor.numel() > 0
        ]
        if held:
            norms = torch._foreach_norm(held, 2, dtype=torch.float32)
            self._notes.append((unit.name, torch.linalg.vector_norm(torch.stack(list(norms)))))

    def clear(self) -> None:
        """Forgets the step."""
        self._notes.clear()

    def raise_found(self) -> None:
        """Asks the judge; waits for the device if there are notes."""
        notes, self._notes = self._notes, []
        if notes:
            norms = torch.stack([norm for _, norm in notes]).cpu()
            for (name, _), norm in zip(notes, norms, strict=True):
                self._judge(name, norm)


class Checks:
    """Several checks one after the other."""

    def __init__(self, checks: Sequence[Check]) -> None:
        self._checks = checks

    def note(self, unit: Unit) -> None:
        """To all of them."""
        for check in self._checks:
            check.note(unit)

    def clear(self) -> None:
        """All of them."""
        for check in self._checks:
            check.clear()

    def raise_found(self) -> None:
        """Of the first that has found something."""
        for check in self._checks:
            check.raise_found()
