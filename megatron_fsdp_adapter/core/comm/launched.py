"""The collectives that a rank has launched in a step, in words."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

KEPT = 20_000
"""The last launches of a step, so many, are kept in words to name the first difference: 160 kB."""

_MASK = (1 << 64) - 1
_PRIME = 0x100000001B3


@dataclass
class Launched:
    """The launches of one rank in a step."""

    # How many.
    count: int = 0
    # The number that they are folded into; 64 bits.
    folded: int = 0
    # The latest ones in words.
    latest: deque[str] = field(default_factory=lambda: deque(maxlen=KEPT))

    def add(self, text: str, code: int) -> None:
        self.count += 1
        self.folded = ((self.folded * _PRIME) ^ code) & _MASK
        self.latest.append(text)

    def text_of(self, index: int) -> str:
        """The launch with that number, from 0, in words."""
        if index >= self.count:
            return "nothing more"
        place = index - (self.count - len(self.latest))
        return self.latest[place] if place >= 0 else "no longer remembered"


@dataclass
class LaunchLog:
    """The launches of an engine in the step that runs, and in the one before. Another thread reads
    it."""

    # The number of the step that runs, from 0.
    step: int = 0
    # In that step.
    launched: Launched = field(default_factory=Launched)
    # In the step before.
    before: Launched = field(default_factory=Launched)
    # The text of the error that ranks wait for each other; "" until that is known.
    failed: str = ""

    def end_step(self) -> None:
        """The step ends: the next launch belongs to another one."""
        self.before = self.launched
        self.launched = Launched()
        self.step += 1
