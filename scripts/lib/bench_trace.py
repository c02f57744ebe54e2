"""What a GPU did in a trace: compute, collectives beside it, collectives alone, nothing; and how
long gathers and reductions ran at once."""

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
GATHER, REDUCE = "AllGather", "ReduceScatter"

SIZE_KEYS = ("In msg nelems", "Out msg nelems")
SMALL = 2**16
"""Elements below which a collective moves no unit of weights: a token dispatcher gathers a few
counts, and such a kernel's time is that of waiting for the other ranks."""


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
    """The collective that a kernel belongs to, "other" if its name does not tell, None if none.
    Copies between GPUs are all-gathers that NCCL leaves to the copy engines."""
    if "ptop" in name.lower():
        return GATHER
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
        kind = kind_of(event["name"])
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


MARKER = "spin_kernel"
"""What `torch.cuda._sleep` launches: between forward and backward, and before the optimizer."""

PARTS = ("forward", "backward", "optimizer", "norm and clip", "casts and copies")
OPTIMIZER = ("adam",)


def time_budget(events: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Milliseconds of a step by what the GPU did; they add up to the span of `budget`.

    `PARTS` are kernels on the stream of the two markers (`MARKER`), before, between and after
    them; after the second one by name. Kernels of other streams that are no collectives are "casts
    and copies". Where several ran at once the one named first in `PARTS` counts. Then follow
    communication that nothing covered, by kind, and "idle". ValueError without both markers.
    """
    found = [event for event in events if event.get("cat") in DEVICE_EVENTS]
    marks = sorted((e["ts"], e["args"].get("stream")) for e in found if MARKER in e["name"])
    if len(marks) != 2:
        raise ValueError(f"the trace has {len(marks)} markers, not one after forward and backward")
    spans: dict[str, list[Span]] = {part: [] for part in PARTS}
    for event in found:
        kind = kind_of(event["name"])
        if MARKER not in event["name"]:
            part = _part_of(event, marks) if kind is None else f"exposed {kind}"
            span = (event["ts"] / 1e3, (event["ts"] + event["dur"]) / 1e3)
            spans.setdefault(part, []).append(span)
    covered: list[Span] = []
    out = {}
    for part, mine in spans.items():
        union = merged([*covered, *mine])
        out[part] = length(union) - length(covered)
        covered = union
    out["idle"] = covered[-1][1] - covered[0][0] - length(covered)
    return out


def _part_of(event: Mapping[str, Any], marks: Sequence[tuple[float, Any]]) -> str:
    name = event["name"].lower()
    if event["args"].get("stream") != marks[0][1]:
        return "casts and copies"
    if event["ts"] < marks[0][0]:
        return "forward"
    if event["ts"] < marks[1][0]:
        return "backward"
    return "optimizer" if any(word in name for word in OPTIMIZER) else "norm and clip"


def time_budget_text(name: str, parts: Mapping[str, float]) -> str:
    """One line."""
    listed = "".join(
        f" {'-' if value < 0 else '+'} {part} {abs(value):.1f}" for part, value in parts.items()
    )
    return f"{name}: {sum(parts.values()):.1f} ms = {listed.removeprefix(' + ')}"


WORK = {
    "attention": ("fmha", "flash", "sdpa", "attention", "cudnn"),
    "products": ("nvjet", "gemm", "cutlass", "xmma"),
    "optimizer": ("adam",),
    "quantising": (
        "cast_transpose", "amax", "quantize", "partial_cast", "transformer_engine::unary_kernel",
    ),
    "transposes": ("transpose_optimized", "transpose_general", "::transpose_kernel"),
    "norm": ("l2norm", "lpnorm"),
    "scaling": (
        "binaryopscalarfunctor", "scalefunctor",
        "unaryfunctor<float, float, float, at::native::binary_internal::mulfunctor",
    ),
    "casts and copies": ("copyfunctor", "bfloat16_copy", "memcpy dtod"),
    "sums": ("reduce_kernel", "_sum_rows"),
    "clearing": ("zerofunctor", "memset"),
}
"""What kernels do, by words of their names; the first that fits. All others are "rest"."""

QUANTISERS = ("_tensors", "_blocks", "_groups", "_scales", "_tiles")
"""Whole names of the kernels of ours that quantise weights."""


@dataclass(frozen=True)
class Work:
    """Milliseconds of kernels by kind of `WORK`, each counted in full; `at_once`: how much of that
    ran beside other kernels, so that the sum less `at_once` is `Budget.compute`."""

    kinds: Mapping[str, float]
    at_once: float


def work(events: Iterable[Mapping[str, Any]]) -> Work:
    """Of all that is no collective. It looks at names alone: the kernels of a CUDA graph run on
    streams that tell nothing."""
    kinds = dict.fromkeys((*WORK, "rest"), 0.0)
    spans: list[Span] = []
    for event in events:
        if event.get("cat") in DEVICE_EVENTS and kind_of(event["name"]) is None:
            name = event["name"].lower()
            kinds[_kind_of_work(name)] += event["dur"] / 1e3
            spans.append((event["ts"] / 1e3, (event["ts"] + event["dur"]) / 1e3))
    return Work(kinds, sum(kinds.values()) - length(merged(spans)))


def _kind_of_work(name: str) -> str:
    if name in QUANTISERS:
        return "quantising"
    fits = (kind for kind, words in WORK.items() if any(word in name for word in words))
    return next(fits, "rest")


def over_floor(found: Trace, floor: Trace) -> dict[str, float]:
    """Milliseconds of a step that add up to its span: the floor's kernels, what each kind of
    kernel takes beyond them, less what ran at once; exposed communication; idle."""
    base = sum(floor.work.kinds.values())
    beyond = {kind: ms - floor.work.kinds[kind] for kind, ms in found.work.kinds.items()}
    rest = {"at once": -found.work.at_once, "exposed": found.budget.exposed}
    return {"the floor's kernels": base, **beyond, **rest, "idle": found.budget.idle}


@dataclass(frozen=True)
class Kernel:
    """A collective's kernel: its kind, the stream it ran on, milliseconds."""

    kind: str
    stream: str
    span: Span


def collective_kernels(events: Iterable[Mapping[str, Any]]) -> list[Kernel]:
    """The gathers and reductions among the events of a trace, in order of time. Left out: kernels
    that the trace itself says are `SMALL`."""
    found = []
    for event in events:
        kind = kind_of(event["name"]) if event.get("cat") in DEVICE_EVENTS else None
        details = event.get("args", {})
        if kind not in (GATHER, REDUCE) or _is_small(details):
            continue
        span = (event["ts"] / 1e3, (event["ts"] + event["dur"]) / 1e3)
        found.append(Kernel(kind, str(details.get("stream", "?")), span))
    return sorted(found, key=lambda kernel: kernel.span)


def _is_small(details: Mapping[str, Any]) -> bool:
    sizes = [str(details[key]) for key in SIZE_KEYS if key in details]
    known = [int(size) for size in sizes if size.isdigit()]
    return bool(known) and max(known) < SMALL


def clipped(spans: Iterable[Span], window: Span) -> list[Span]:
    """The parts of disjoint spans that lie inside `window`."""
    cut = ((max(start, window[0]), min(end, window[1])) for start, end in spans)
    return [(start, end) for start, end in cut if start < end]


@dataclass(frozen=True)
class Overlap:
    """Milliseconds in which gathers ran, reductions ran, and one of each at once.

    gather, reduce: of the whole step. gather_beside: of gathers between the start of the first
    reduction and the end of the last, the only ones that could run beside one (the rest belong to
    the forward). streams: milliseconds by stream and kind.
    """

    gather: float
    reduce: float
    gather_beside: float
    together: float
    streams: Mapping[str, Mapping[str, float]]

    @property
    def share(self) -> float | None:
        """Of the shorter one's time, where both could run; None without either."""
        return _share(self.together, self.gather_beside, self.reduce)

    @property
    def share_of_step(self) -> float | None:
        """The same with all gathers of the step."""
        return _share(self.together, self.gather, self.reduce)


def _share(part: float, *wholes: float) -> float | None:
    shorter = min(wholes)
    return part / shorter if shorter > 0 else None


def overlap(kernels: Sequence[Kernel]) -> Overlap:
    """How gathers and reductions shared the time. A stream's kernels of one kind are added up as a
    union, so that what overlaps within a kind is not counted twice."""
    by_kind = {
        kind: merged(kernel.span for kernel in kernels if kernel.kind == kind)
        for kind in (GATHER, REDUCE)
    }
    gathers, reductions = by_kind[GATHER], by_kind[REDUCE]
    window = (reductions[0][0], reductions[-1][1]) if reductions else (0.0, 0.0)
    by_stream: dict[str, dict[str, list[Span]]] = {}
    for kernel in kernels:
        by_stream.setdefault(kernel.stream, {}).setdefault(kernel.kind, []).append(kernel.span)
    return Overlap(
        gather=length(gathers),
        reduce=length(reductions),
        gather_beside=length(clipped(gathers, window)),
        together=shared(gathers, reductions),
        streams={
            stream: {kind: length(merged(spans)) for kind, spans in sorted(kinds.items())}
            for stream, kinds in sorted(by_stream.items())
        },
    )


@dataclass(frozen=True)
class Trace:
    """What is read from the trace of one step; no `parts` where it has no markers."""

    budget: Budget
    overlap: Overlap
    work: Work
    parts: Mapping[str, float]


def read_trace(path: Path) -> Trace:
    """Of a trace file, compressed or not. ValueError without GPU events."""
    events = read_events(path)
    marked = any(MARKER in str(event.get("name")) for event in events)
    parts = time_budget(events) if marked else {}
    return Trace(budget(events), overlap(collective_kernels(events)), work(events), parts)


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


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f}%"


def overlap_text(name: str, found: Overlap) -> str:
    """One line."""
    streams = "; ".join(
        f"stream {stream}: " + ", ".join(f"{kind} {value:.2f}" for kind, value in kinds.items())
        for stream, kinds in found.streams.items()
    )
    return (
        f"{name}: gather and reduce at once {found.together:.2f} ms = {_percent(found.share)} of "
        f"the shorter one (gathers beside reductions {found.gather_beside:.2f} ms, reductions "
        f"{found.reduce:.2f} ms), {_percent(found.share_of_step)} with all gathers of the step "
        f"({found.gather:.2f} ms); {streams or 'no such kernel'}"
    )
