"""Gradients that an optimizer reads in host memory: sums are made on the device.

backward          sums on the device
its end           moved to the host: `.grad`, which the program may change
next backward     copied back, and added to, unless the program has cleared them
"""

from __future__ import annotations

from collections.abc import Iterable

from ..core.engine.grad_states import REDUCED_STATES
from ..core.engine.params import ParamPair
from ..core.runtime.device import COMPUTE, GATHER, Runtime


def store(pairs: Iterable[ParamPair], runtime: Runtime) -> None:
    """Moves reduced gradients to the host, which waits for them. Main weights may be written after
    this: no gather reads them any more."""
    moved = []
    for group in dict.fromkeys(pair.group for pair in pairs):
        grads = group.grads
        is_due = grads.state in REDUCED_STATES and not grads.is_withheld
        if grads.host is not None and is_due and not grads.is_on_host:
            grads.copy_to_host()
            moved.append(grads)
    if moved:
        runtime.follow(COMPUTE, GATHER)
        runtime.block(runtime.record(COMPUTE))
    for grads in moved:
        grads.moved_to_host()
