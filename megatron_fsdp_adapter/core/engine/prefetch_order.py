"""The order in which units ask for their weights: recorded in every pass, and replayed in the next
pass of the same direction.

The module order stands in for the first pass. A static order alone was rejected: models run layers
in another order than they list them, and recomputation asks for weights in an order of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

FORWARD = "forward"
BACKWARD = "backward"

LOOKAHEAD = 8
"""Number of requests that may run ahead of the recorded order before the order is given up."""


class PrefetchOrder:
    """Recorded orders of unit ordinals, one a direction.

    Args:
        num_units: ordinals run from 0 to the root unit's. The first passes begin with the root unit
            and go up in forward, down in backward.
        forward_only: ordinals that ask for no weights in backward.
    """

    def __init__(self, num_units: int, forward_only: Collection[int] = ()) -> None:
        up = list(range(num_units))
        down = [ordinal for ordinal in up[::-1] if ordinal not in forward_only]
        # The order of the last pass of each direction.
        self._known = {FORWARD: up[-1:] + up[:-1], BACKWARD: down}
        # The order of the pass that runs, so far.
        self._recording: list[int] = []
        # The ordinals expected after the last request; empty if that did not fit the known order.
        self._upcoming: list[int] = []
        # Direction of the pass that runs, or ran last.
        self.direction = FORWARD
        # Place in the known order behind the last request that fitted it.
        self._position = 0

    def begin(self, direction: str) -> None:
        """Starts a pass: what the last one recorded becomes the known order of its direction."""
        if self._recording:
            self._known[self.direction] = self._recording
        self._recording = []
        self.direction = direction
        self._position = 0

    def request(self, ordinal: int) -> Sequence[int]:
        """Notes that `ordinal` is needed now; returns the ordinals expected after it.

        Empty when the request does not fit the known order: then units are gathered on
        demand until one fits again, and the next pass knows better. A unit that asks again, as
        recomputation does, gets the same answer.
        """
        if self._recording and self._recording[-1] == ordinal:
            return self._upcoming
        self._recording.append(ordinal)
        known = self._known[self.direction]
        ahead = known[self._position : self._position + LOOKAHEAD]
        if ordinal in ahead:
            self._position += ahead.index(ordinal) + 1
            self._upcoming = known[self._position :]
        else:
            self._upcoming = []
        return self._upcoming

    @property
    def ends(self) -> bool:
        """True if this is a backward pass that has asked for the last unit of the known order."""
        return self.direction == BACKWARD and self._position == len(self._known[BACKWARD])

    def first(self) -> Sequence[int]:
        """The ordinals that a forward pass is expected to ask for before any computation: the
        root unit, which a pass asks for when it starts, and the first unit that computes."""
        return self._known[FORWARD][:2]

    def forward(self) -> Sequence[int]:
        """The ordinals in the order in which a forward pass is expected to ask for them."""
        return list(self._known[FORWARD])

    def is_last(self, ordinal: int) -> bool:
        """True if `ordinal` ended the last known forward pass."""
        return self._known[FORWARD][-1:] == [ordinal]
