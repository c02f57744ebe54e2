"""Summarizes a GPU trace: compute, overlapped collectives, exposed collectives, idle."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Span = tuple[float, float]

DEVICE_EVENTS = ("kernel", "gpu_memcpy", "gpu_memset")
COLLECTIVES = ("AllGather", "ReduceScatter", "AllReduce", "Broadcast", "SendRecv")


def merged(spans: Iterable[Span]) -> list[Span]:
    """The union of spans, as disjoint spans in order."""
    out: list[Span] = []
    for start, end in sorted(spans):
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(end, out[-1][1]))
        else:
            out.append((start, end))
    return out


def length(spans: Iterable[Span]) -> float:
    """The total length of disjoint spans."""
    return sum(end - start for start, end in spans)


def beyond(spans: Sequence[Span], covered: Sequence[Span]) -> float:
    """The length of `spans` outside `covered`. Each of the two is disjoint in itself."""
    return length(merged([*spans, *covered])) - length(covered)


def kind_of(name: str) -> str | None:
    """The kind of collective of a kernel: "other" if its name does not show the kind, None if it is
    no collective. Copies between GPUs count as all-gathers, which copy engines run."""
    kernel = name.lower()
    if "ptop" in kernel:
        return COLLECTIVES[0]
    if "nccl" not in kernel:
        return None
    for kind in COLLECTIVES:
        if kind.lower() in kernel:
            return kind
    return "other"


def budget(events: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Milliseconds by purpose, from the first device event to the last of a torch.profiler trace.

    span: all of it, the sum of the next three;
    compute: a kernel or copy that is no collective ran;
    exposed: a collective ran, and no compute; also by kind, where two kinds at once count for both;
    idle: nothing ran;
    beside: collectives ran beside compute;
    together: gathers and reductions ran at once.

    Raises ValueError without events of a GPU.
    """
    spans: dict[str | None, list[Span]] = {None: []}
    for event in events:
        if event.get("cat") not in DEVICE_EVENTS:
            continue
        start = event["ts"]
        end = start + event["dur"]
        kind = kind_of(event["name"])
        spans.setdefault(kind, []).append((start / 1e3, end / 1e3))
    busy = merged(spans.pop(None))
    by_kind = {str(kind): merged(found) for kind, found in spans.items()}
    talk = merged(span for found in by_kind.values() for span in found)
    anything = merged([*busy, *talk])
    if not anything:
        raise ValueError("the trace has no event of a GPU")
    extent = anything[-1][1] - anything[0][0]
    gathers = by_kind.get("AllGather", [])
    reductions = by_kind.get("ReduceScatter", [])
    exposed = beyond(talk, busy)
    return {
        "span": extent,
        "compute": length(busy),
        "exposed": exposed,
        **{f"exposed {kind}": beyond(by_kind[kind], busy) for kind in sorted(by_kind)},
        "idle": extent - length(anything),
        "beside": length(talk) - exposed,
        "together": length(gathers) - beyond(gathers, reductions),
    }


def read_events(path: Path) -> list[dict[str, Any]]:
    """The events of a trace file, compressed or not."""
    content = path.read_bytes()
    if path.suffix == ".gz":
        content = gzip.decompress(content)
    return json.loads(content)["traceEvents"]


def budget_text(name: str, found: Mapping[str, float]) -> str:
    """A summary in one line."""
    parts = [f"{what} {value:.2f} ms" for what, value in found.items()]
    return f"{name}: {', '.join(parts)}"
