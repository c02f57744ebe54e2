"""Gradients that are not finite, or unexpectedly large: noted on the device before they are
communicated, and read by the host once a step.

The largest magnitude is what is noted: NaN and infinity go through a maximum, and unlike a norm it
cannot overflow where all gradients are finite. Reading it when it is noted was rejected: the host
would wait for the device in every unit's backward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ..core.engine.unit import Unit

Judge = Callable[[str, torch.Tensor], None]
"""Called with the name of a unit and a norm, a 0-dim float32 tensor on the CPU."""

MOST_LINES = 20
"""Of an error: after a bad microbatch nearly every parameter is bad."""


@dataclass(frozen=True)
class Note:
    """`largest[i]` is the largest magnitude, as a 0-dim device tensor, of what `names[i]` names."""

    microbatch: int
    names: tuple[str, ...]
    largest: list[torch.Tensor]


class GradCheck:
    """Args:
    by_param: whether the error names parameters; otherwise it names units, which takes one
        reading of each flat buffer instead of one of each parameter.
    finite: whether gradients that are not finite are an error.
    judge: called at the end of the step with the 2-norm of each unit's gradients after each of its
        backwards, in their order. Where microbatches add up in one buffer, that is of their sum.
    """

    def __init__(self, by_param: bool, finite: bool = True, judge: Judge | None = None) -> None:
        self.by_param, self._finite, self._judge = by_param, finite, judge
        self._backwards: Counter[int] = Counter()
        self._notes: list[Note] = []
        self._norms: list[tuple[str, torch.Tensor]] = []

    def note(self, unit: Unit) -> None:
        """Looks at the gradients that `unit`'s backward has just added to its buffers."""
        named = [
            (f"unit {unit.name}", tensor)
            for group in unit.active_groups
            for tensor in group.collected.segments(group.full) if tensor.numel() > 0
        ]  # fmt: skip
        if self._judge is not None and named:
            norms = torch._foreach_norm([tensor for _, tensor in named], 2, dtype=torch.float32)
            norm = torch.linalg.vector_norm(torch.stack(list(norms)))
            self._norms.append((unit.name, norm))
        if self.by_param:
            named = [
                (f"unit {unit.name}, parameter {managed.fqns[0]}", tensor)
                for group in unit.active_groups
                for managed, tensor in zip(group.managed, group.collected.params, strict=True)
                if tensor.numel() > 0
            ]
        if self._finite and named:
            largest = torch._foreach_norm([tensor for _, tensor in named], float("inf"))
            names = tuple(name for name, _ in named)
            self._notes.append(Note(self._backwards[unit.ordinal], names, list(largest)))
        self._backwards[unit.ordinal] += 1

    def clear(self) -> None:
        """Forgets the step."""
        self._backwards.clear()
        self._notes.clear()
        self._norms.clear()

    def raise_found(self) -> None:
        """Raises RuntimeError for what was not finite, then asks the judge; waits for the device if
        there are notes.

        Each name is reported once, with the microbatch (from 0) in which it was first found: where
        microbatches add up in one buffer, it is not finite in all later ones.
        """
        (notes, self._notes), (norms, self._norms) = (self._notes, []), (self._norms, [])
        if notes:
            self._raise_not_finite(notes)
        if norms and self._judge is not None:
            values = torch.stack([norm for _, norm in norms]).cpu()
            for (name, _), norm in zip(norms, values, strict=True):
                self._judge(name, norm)

    def _raise_not_finite(self, notes: list[Note]) -> None:
        every = [value.float() for note in notes for value in note.largest]
        values = iter(torch.stack(every).tolist())
        found: dict[str, str] = {}
        for note in notes:
            for name in note.names:
                value = next(values)
                if not abs(value) < float("inf"):
                    found.setdefault(name, f"microbatch {note.microbatch}, {name}: {value}")
        if found:
            raise RuntimeError(self._message(list(found.values())))

    def _message(self, lines: list[str]) -> str:
        rank = dist.get_rank()
        shown = [f"  - rank {rank}, {line}" for line in lines[:MOST_LINES]]
        if len(lines) > MOST_LINES:
            shown.append(f"  - and {len(lines) - MOST_LINES} more")
        remedy = "" if self.by_param else " report_nan_in_param_grad=True names the parameters."
        return (
            f"gradients of rank {rank} are not finite before communication (microbatches count "
            f"from 0, the value is the largest magnitude).{remedy}\n" + "\n".join(shown)
        )
