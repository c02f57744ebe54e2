"""What one rank's step asks of its device: operations in the order in which the host launches them.

A program has no times. The same one is timed on any machine (`timing.py`).
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass


class Kind(enum.Enum):
    """What an operation is limited by: the table of costs has a row for each."""

    PRODUCT = "matrix product"
    GROUPED = "grouped matrix product"
    FP8_PRODUCT = "FP8 matrix product"
    FP8_GROUPED = "grouped FP8 matrix product"
    BLOCK_PRODUCT = "FP8 matrix product of blocks"
    ATTENTION = "attention"
    MEMORY = "memory pass"
    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_REDUCE = "all-reduce"
    EXCHANGE = "all-to-all"


PRODUCTS = (
    Kind.PRODUCT, Kind.GROUPED, Kind.FP8_PRODUCT, Kind.FP8_GROUPED, Kind.BLOCK_PRODUCT,
)  # fmt: skip
COLLECTIVES = (Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_REDUCE, Kind.EXCHANGE)


@dataclass(frozen=True)
class Operation:
    """One launch.

    Attributes:
        role: the stream.
        kind: what limits it.
        amount: floating-point operations of products and attention; bytes read and written of a
            memory pass; of a collective the bytes of the whole buffer (the output of a gather, the
            input of a reduction).
        label: for people, e.g. "forward decoder.layers.3".
        part: the part of the step that it belongs to, e.g. "forward", "optimizer".
        after: numbers of operations, in the program, that must have ended.
        kernels: how many there are, each with a gap behind it.
        host: reference microseconds of the host between the launch before and this one.
        group: of a collective, the axis that it runs on, as in `Groups`.
        channel: of a collective, its communicator: those of one run one after the other.
        copy_engine: carried by copy engines, which leave the compute units alone.
        read: the host reads what comes out, and launches nothing before it has.
    """

    role: str
    kind: Kind
    amount: float
    label: str = ""
    part: str = ""
    after: tuple[int, ...] = ()
    kernels: int = 1
    host: float = 0.0
    group: str = ""
    channel: str = ""
    copy_engine: bool = False
    read: bool = False

    def __post_init__(self) -> None:
        if self.amount < 0 or self.host < 0:
            raise ValueError(
                f"operation {self.label!r}: amount={self.amount} and host={self.host} must be 0 "
                "or more"
            )


@dataclass(frozen=True)
class Program:
    """operations: in launch order. marks: name and number of operations before it, e.g. the begin
    of a step. live_bytes: of transient and kept buffers after each change, with the number of
    operations before it."""

    operations: Sequence[Operation]
    marks: Sequence[tuple[str, int]]
    live_bytes: Sequence[tuple[int, int]] = ()

    @property
    def most_bytes(self) -> int:
        """The most that the engine's buffers take at once."""
        return max((count for _, count in self.live_bytes), default=0)
