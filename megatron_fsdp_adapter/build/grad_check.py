"""Finds gradients that are not finite. Their largest magnitude is noted on the device before they
are communicated; the host reads the notes once a step.

A maximum keeps NaN and infinity and, unlike a sum of squares, cannot overflow where all gradients
are finite. The host does not read a note at once: it would wait for the device in every unit's
backward.
"""

from __future__ import annotations

from collections import Counter

import torch
import torch.distributed as dist

from ..core.engine.unit import Unit

MOST_LINES = 20
"""Lines of an error at most, because after a bad microbatch nearly every parameter is bad."""


class GradCheck:
    """Notes the gradients of a step, and raises if one is not finite.

    by_param: the error names parameters; otherwise units, which needs one note for each flat buffer
    instead of one for each parameter.
    """

    def __init__(self, by_param: bool) -> None:
        self.by_param = by_param
        # Number of backwards in this step, by the unit's number.
        self._backwards: Counter[int] = Counter()
        # Microbatch, name, and the largest magnitude in the gradient of that name, a 0-dim tensor
        # on the device.
        self._notes: list[tuple[int, str, torch.Tensor]] = []

    def note(self, unit: Unit) -> None:
        """Notes the gradients that `unit`'s backward has just added to its buffers."""
        names = []
        tensors = []
        for group in unit.active_groups:
            if self.by_param:
                names += [f"unit {unit.name}, parameter {m.fqns[0]}" for m in group.managed]
                tensors += group.grads.collected.params
            else:
                segments = group.grads.collected.segments(group.shards.full)
                names += [f"unit {unit.name}"] * len(segments)
                tensors += segments
        filled = [i for i, tensor in enumerate(tensors) if tensor.numel() > 0]
        if filled:
            number = self._backwards[unit.ordinal]
            largest = torch._foreach_norm([tensors[i] for i in filled], float("inf"))
            for i, one in zip(filled, largest, strict=True):
                self._notes.append((number, names[i], one))
        self._backwards[unit.ordinal] += 1

    def clear(self) -> None:
        """Forgets the notes and the count of backwards."""
        self._backwards.clear()
        self._notes.clear()

    def raise_found(self) -> None:
        """Raises RuntimeError if a noted gradient is not finite, and forgets the notes. Waits for
        the device if there are notes.

        Each name is reported once, with the first microbatch (from 0) in which it is not finite.
        Where microbatches add up in one buffer, it is not finite in all later ones either.
        """
        notes = self._notes
        self._notes = []
        if not notes:
            return
        values = torch.stack([largest.float() for _, _, largest in notes]).tolist()
        found: dict[str, str] = {}
        for (microbatch, name, _), value in zip(notes, values, strict=True):
            if not abs(value) < float("inf"):  # NaN too
                found.setdefault(name, f"microbatch {microbatch}, {name}: {value}")
        if found:
            raise RuntimeError(self._message(list(found.values())))

    def _message(self, lines: list[str]) -> str:
        rank = dist.get_rank()
        shown = [f"  - rank {rank}, {line}" for line in lines[:MOST_LINES]]
        if len(lines) > MOST_LINES:
            shown.append(f"  - and {len(lines) - MOST_LINES} more")
        if self.by_param:
            remedy = ""
        else:
            remedy = " report_nan_in_param_grad=True names the parameters."
        return (
            f"gradients of rank {rank} are not finite before communication (microbatches count "
            f"from 0, the value is the largest magnitude).{remedy}\n" + "\n".join(shown)
        )
