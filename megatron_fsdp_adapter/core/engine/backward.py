"""The state of one backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

from .unit import Unit


@dataclass
class Backward:
    """A backward, while it runs and until the next begins."""

    # Whether it accumulates gradients of weights.
    accumulates: bool = True
    # `FsdpEngine.is_last_microbatch` as it begins.
    is_last: bool | None = None
    # Whether units that keep gradients are completed at its end, as more may come to them.
    waits: bool = False
    # Ordinals of units whose forward goes on after it, which runs inside of it.
    around: Collection[int] = ()
    # False once it has ended, or raised.
    running: bool = True
    # By ordinal, how many calls of a unit have all their gradients.
    calls: Counter[int] = field(default_factory=Counter)
    # Ordinals of completed units, in that order.
    done: dict[int, None] = field(default_factory=dict)
    # The unit whose module has returned last; None before, and when a unit is called in backward.
    last_returned: Unit | None = None
