"""What a GPU did in a trace: compute, collectives beside it, collectives alone, nothing."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Span = tuple[float, float]

DEVICE_EVENTS = ("kernel", "gpu_memcpy", "gpu_memset")
COLLECTIVES = ("AllGather", "ReduceScatter", "AllReduce", "Broadcast", "SendRecv")


def merged(spans: Iterable[Span]) -> list[Span]:
    """The union, as disjoint spans in order."""
    out: list[Span] = []
    for start, end in sorted(spans):
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(end, out[-1][1]))
        else:
            out.append((start, end))
    return out


def length(spans: Iterable[Span]) -> float:
    """Of disjoint spans."""
    return sum(end - start for start, end in spans)


def shared(first: Sequence[Span], second: Sequence[Span]) -> float:
    """Length of the intersection of two unions, each disjoint and in order."""
    total, i, j = 0.0, 0, 0
    while i < len(first) and j < len(second):
        total += max(0.0, min(first[i][1], second[j][1]) - max(first[i][0], second[j][0]))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return total


@dataclass(frozen=True)
class Budget:
    """Milliseconds from the first device event to the last: `compute + exposed + idle` is `span`.

    compute: at least one kernel or copy that is no collective ran. communication: at least one
    collective ran. exposed: a collective ran and no compute did; by kind in `exposed_by_kind`,
    where two kinds at once count for both. idle: nothing ran.
    """

    span: float
    compute: float
    communication: float
    exposed: float
    idle: float
    exposed_by_kind: Mapping[str, float]

    @property
    def overlapped(self) -> float:
        """Communication beside compute."""
        return self.communication - self.exposed


def kind_of(name: str) -> str | None:
    """The collective that a kernel belongs to, "other" if its name does not tell, None if none."""
    if "nccl" not in name.lower():
        return None
    return next((kind for kind in COLLECTIVES if kind.lower() in name.lower()), "other")


def budget(events: Iterable[Mapping[str, Any]]) -> Budget:
    """Of the events of a trace that torch.profiler wrote. ValueError without GPU events."""
    compute: list[Span] = []
    collectives: dict[str, list[Span]] = {}
    for event in events:
        if event.get("cat") not in DEVICE_EVENTS:
            continue
        span = (event["ts"] / 1e3, (event["ts"] + event["dur"]) / 1e3)
        kind = kind_of(event["name"]) if event["cat"] == "kernel" else None
        (compute if kind is None else collectives.setdefault(kind, [])).append(span)
    busy = merged(compute)
    talk = merged(span for spans in collectives.values() for span in spans)
    anything = merged([*busy, *talk])
    if not anything:
        raise ValueError("the trace has no event of a GPU")
    extent = anything[-1][1] - anything[0][0]
    by_kind = {kind: merged(spans) for kind, spans in sorted(collectives.items())}
    return Budget(
        span=extent,
        compute=length(busy),
        communication=length(talk),
        exposed=length(talk) - shared(talk, busy),
        idle=extent - length(anything),
        exposed_by_kind={k: length(spans) - shared(spans, busy) for k, spans in by_kind.items()},
    )


def read_events(path: Path) -> list[dict[str, Any]]:
    """The events of a trace file, compressed or not."""
    content = path.read_bytes()
    return json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)["traceEvents"]


def budget_text(name: str, found: Budget) -> str:
    """One line."""
    kinds = ", ".join(f"{kind} {value:.2f}" for kind, value in found.exposed_by_kind.items())
    return (
        f"{name}: {found.span:.2f} ms = compute {found.compute:.2f} + exposed communication "
        f"{found.exposed:.2f} ({kinds}) + idle {found.idle:.2f}; "
        f"{found.overlapped:.2f} ms of communication beside compute"
    )
