"""The time after which a reduction over replicas is given up.

On CUDA nothing else tells that a replica has died: kernels of the others wait for it. With gloo the
neighbors of a dead replica fail at once, and others wait for these. torchft looks at a reduction
when its time is over, from a thread of its own: on CUDA it then aborts the communicator, which ends
the kernels. The step has failed, and is repeated.

Replicas that are merely late fail such a step too. So the time follows from how long steps take,
and grows until a step is committed.
"""

from __future__ import annotations

SHORTEST = 20.0
"""Seconds that replicas may wait for each other before anything is known of their steps."""
STEPS = 2.0
"""Steps, as long as the last one. It was that long with all waits for other replicas, so none was
later than that."""
GROWTH = 2.0
"""Times longer after each attempt that fails."""


class ReductionLimit:
    """The time that a reduction may take in the next attempt at a step, as `seconds`.

    most: seconds that it never exceeds.
    """

    def __init__(self, most: float) -> None:
        self._most = most  # seconds, as given
        self.seconds = min(SHORTEST, most)  # of the next attempt

    def committed(self, took: float) -> None:
        """A step was committed that took so many seconds."""
        self.seconds = min(max(SHORTEST, STEPS * took), self._most)

    def failed(self) -> None:
        """An attempt at a step has failed."""
        self.seconds = min(GROWTH * self.seconds, self._most)
