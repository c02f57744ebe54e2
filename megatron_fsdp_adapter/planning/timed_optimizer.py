"""What an optimizer's step asks of the device: the norm, the clip, and Adam.

These are not run by the real optimizers, whose kernels the meta device does not have; the order of
launches is theirs.
"""

from __future__ import annotations

from dataclasses import dataclass

from .program import Kind
from .timed_runtime import TimedRuntime

LAUNCHES = 2000.0
"""Reference microseconds in which the host launches norm, clip and Adam."""

ONE_PASS = 0.81
"""Time of the one-pass Adam (`sharding/fused_adam.py`) in that of Transformer Engine's, after
which the rates of memory are: 3.36 of 4.14 TB/s, H200."""


@dataclass(frozen=True)
class Widths:
    """Bytes of an element: of gradients, main weights, optimizer state. adam: by what the time of
    Adam's pass over them is multiplied."""

    grad: int = 4
    main: int = 4
    state: int = 8
    adam: float = ONE_PASS


def write_norm(runtime: TimedRuntime, numel: int, widths: Widths, clips: bool) -> None:
    """The norm of gradients, which the host reads, and the clip."""
    runtime.spend(LAUNCHES)
    runtime.write(Kind.MEMORY, numel * widths.grad, label="gradient norm", part="norm", read=True)
    if clips:
        runtime.write(Kind.MEMORY, 2 * numel * widths.grad, label="clip", part="norm")


def write_adam(runtime: TimedRuntime, numel: int, widths: Widths) -> None:
    """Adam's pass over gradients, main weights and state."""
    nbytes = widths.adam * numel * (widths.grad + 2 * widths.main + 2 * widths.state)
    runtime.write(Kind.MEMORY, round(nbytes), label="Adam", part="optimizer")
