"""The program of a rank's step: device operations in launch order.

A program has no times, so that it can be timed for any machine (`timing.py`).
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass


class Kind(enum.Enum):
    """The kind of an operation, which decides its rate."""

    PRODUCT = "GEMM"
    GROUPED = "grouped GEMM"
    ATTENTION = "attention"
    MEMORY = "memory pass"
    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_REDUCE = "all-reduce"
    EXCHANGE = "all-to-all"


PRODUCTS = (Kind.PRODUCT, Kind.GROUPED)
COLLECTIVES = (Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_REDUCE, Kind.EXCHANGE)


@dataclass(frozen=True)
class Operation:
    """One launch.

    Attributes:
        role: the stream.
        kind: decides its rate.
        amount: FLOPs of GEMMs and attention; bytes read and written of a memory pass; for a
            collective the bytes of the whole buffer (the output of a gather, the input of a
            reduction).
        part: the part of the step that it belongs to, e.g. "forward", "optimizer".
        after: numbers of operations, in the program, that must have ended.
        kernels: number of kernels, each followed by a gap.
        host: reference microseconds of the host between the previous launch and this one.
        group: axis of a collective, as in `configurations.groups`.
        channel: communicator of a collective; collectives of one channel are sequential.
        copy_engine: runs on copy engines, not on compute units.
        read: the host reads the result, and launches nothing before.
    """

    role: str
    kind: Kind
    amount: float
    part: str = ""
    after: tuple[int, ...] = ()
    kernels: int = 1
    host: float = 0.0
    group: str = ""
    channel: str = ""
    copy_engine: bool = False
    read: bool = False


@dataclass(frozen=True)
class Program:
    """Recorded operations.

    operations: in launch order. marks: name and number of operations before it, e.g. the begin of a
    step."""

    operations: Sequence[Operation]
    marks: Sequence[tuple[str, int]]
