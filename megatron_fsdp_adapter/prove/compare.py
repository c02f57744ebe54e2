"""Differences of two steps, their bounds, and descriptions of differences.

Pure functions of tensors. A difference of tensors is sum |a - b| / sum |b|, where b is the
reference. Sums of squares are not used: Adam turns differences of tiny gradients into large ones
(their sign decides), and these few elements would dominate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

Tensors = Mapping[str, torch.Tensor]

EPS: Mapping[str, float] = {
    "fp32": 2.0**-23,
    "fp16": 2.0**-10,
    "bf16": 2.0**-7,
    "fp8": 2.0**-3,
}
"""The distance from 1 to the next number. fp8 is E4M3."""

FACTORS: Mapping[str, Mapping[str, float]] = {
    "fp32": {"loss": 32, "norm": 64, "gradients": 256, "update": 2048},
    "fp16": {"loss": 4, "norm": 8, "gradients": 16, "update": 32},
    "bf16": {"loss": 1, "norm": 2, "gradients": 4, "update": 8},
    "fp8": {"loss": 0.25, "norm": 0.25, "gradients": 1.5, "update": 3},
}
"""The bound in step n is n * factor * EPS. Wide dtypes have larger factors, because sums of
thousands of terms in another order need them, and 3e-5 is still far below any real error."""

ROW = 4.0
"""A single row may differ by this factor more than the whole tensor."""


@dataclass(frozen=True)
class Row:
    """One comparison: `quantity` of `run` in `step`.

    name: the worst parameter (empty for loss and norm); difference: its difference; remark: a
    description of a difference beyond the bound; compared, differing: numbers of parameters.
    """

    run: str
    step: int
    quantity: str
    difference: float
    bound: float
    name: str = ""
    remark: str = ""
    compared: int = 1
    differing: int = 0

    @property
    def holds(self) -> bool:
        """True if the difference is finite and within the bound."""
        return math.isfinite(self.difference) and self.difference <= self.bound


@dataclass(frozen=True)
class Gap:
    """The difference of a tensor from the reference.

    difference: the larger of the whole tensor's difference and the worst row's divided by `ROW`;
    rows: those beyond the bound."""

    difference: float
    rows: tuple[int, ...] = ()


def bound(dtype: str, quantity: str, step: int) -> float:
    """The bound of a quantity in a step (from 1), for the narrowest dtype in its computation."""
    return EPS[dtype] * FACTORS[dtype][quantity] * step


def gap(mine: torch.Tensor, theirs: torch.Tensor, allowed: float, floor: float = 0.0) -> Gap:
    """The gap of two tensors of one shape. floor: magnitude of elements below which differences
    count as rounding."""
    if mine.shape != theirs.shape:
        return Gap(math.inf)
    if not bool(torch.isfinite(mine).all()):
        bad = _as_rows(~torch.isfinite(mine)).any(1)
        return Gap(math.nan, tuple(bad.nonzero().flatten().tolist()))
    if mine.numel() == 0:
        return Gap(0.0)
    off = _as_rows((mine.double() - theirs.double()).abs()).sum(1)
    size = _as_rows(theirs.double().abs()).sum(1)
    width = mine.numel() / len(size)
    total = float(off.sum() / size.sum().clamp_min(max(floor * mine.numel(), 1e-300)))
    typical = size.mean().clamp_min(max(floor * width, 1e-300))
    per_row = off / size.clamp_min(typical) / ROW
    beyond = (per_row > allowed).nonzero().flatten().tolist()
    return Gap(max(total, float(per_row.max())), tuple(beyond))


def _as_rows(value: torch.Tensor) -> torch.Tensor:
    """The value as a matrix of rows. A vector is split into rows of 8, because single elements are
    too noisy."""
    if value.ndim >= 2:
        return value.reshape(value.shape[0], -1)
    short = value.reshape(-1)
    pad = -short.numel() % 8
    return torch.nn.functional.pad(short, (0, pad)).reshape(-1, 8)


def compare_tensors(
    run: str, step: int, quantity: str, mine: Tensors, theirs: Tensors, allowed: float,
) -> Row:
    """Compares all tensors of one quantity; returns a row for the worst."""
    missing = sorted(mine.keys() ^ theirs.keys())
    if missing:
        return Row(run, step, quantity, math.inf, allowed, missing[0], "only one of the two has it",
                   len(theirs), len(missing))  # fmt: skip
    total = sum(float(v.double().abs().sum()) for v in theirs.values())
    number = sum(v.numel() for v in theirs.values())
    floor = 1e-3 * total / max(number, 1)
    gaps = {name: gap(mine[name], theirs[name], allowed, floor) for name in theirs}
    bad = [n for n, g in gaps.items() if not g.difference <= allowed]
    worst = max(gaps, key=lambda n: _rank(gaps[n].difference))
    remark = ""
    if bad:
        remark = explain(quantity, {n: mine[n] for n in bad}, {n: theirs[n] for n in bad},
                         gaps[worst].rows, worst, list(theirs))  # fmt: skip
    return Row(run, step, quantity, gaps[worst].difference, allowed, worst, remark, len(theirs),
               len(bad))  # fmt: skip


def _rank(difference: float) -> float:
    return math.inf if math.isnan(difference) else difference


def compare_numbers(
    run: str, step: int, quantity: str, mine: float, theirs: float, allowed: float
) -> Row:
    """Compares loss or norm, relative to the reference."""
    scale = max(abs(theirs), 1e-30)
    difference = abs(mine - theirs) / scale
    row = Row(run, step, quantity, difference, allowed)
    if row.holds:
        return row
    return Row(run, step, quantity, difference, allowed, "", f"{mine:.6g} for {theirs:.6g}",
               1, 1)  # fmt: skip


def significant_update(
    before: Tensors, after: Tensors, gradients: Sequence[Tensors], allowed: float
) -> dict[str, torch.Tensor]:
    """The updates of a step, with zeros for elements whose gradients were never larger than the
    allowed differences: Adam steps by the sign of those, which is arbitrary."""
    found = {}
    for name, new in after.items():
        if name not in before:
            continue
        largest = None
        for step in gradients:
            if name in step:
                size = step[name].abs()
                decided = (size > allowed * size.mean()).to(new.dtype)
                largest = decided if largest is None else torch.maximum(largest, decided)
        change = new - before[name]
        found[name] = change if largest is None else change * largest
    return found


# Descriptions of a difference.


def explain(
    quantity: str, mine: Tensors, theirs: Tensors, rows: Sequence[int], worst: str,
    everything: Sequence[str],
) -> str:
    """A description of the parameters that differ."""
    found = [text for text in (look(mine, theirs, rows, worst) for look in _LOOKS) if text]
    return "; ".join([_where(list(mine), everything), *found[:2]])


def unit_of(name: str) -> str:
    """The layer that a parameter belongs to, or the first part of its name."""
    words = name.split(".")
    for i, word in enumerate(words):
        if word == "layers" and i + 1 < len(words):
            return ".".join(words[: i + 2])
    return words[0]


def _where(names: list[str], everything: Sequence[str]) -> str:
    units = list(dict.fromkeys(unit_of(name) for name in names))
    if len(names) == len(everything):
        return f"all {len(names)} parameters"
    if len(units) == 1:
        inside = sum(unit_of(name) == units[0] for name in everything)
        return f"only {units[0]} ({len(names)} of its {inside} parameters)"
    return f"{len(names)} of {len(everything)} parameters, in {', '.join(units[:4])}"


def _not_finite(
    mine: Tensors, theirs: Tensors, rows: Sequence[int], worst: str
) -> str | None:
    bad = mine[worst]
    if bool(torch.isfinite(bad).all()):
        return None
    kind = "NaN" if bool(torch.isnan(bad).any()) else "infinite"
    return f"{kind}: uninitialized memory was read, or a number overflowed{_span(rows)}"


def _zero(
    mine: Tensors, theirs: Tensors, rows: Sequence[int], worst: str
) -> str | None:
    if any(bool(value.any()) for value in mine.values()):
        return None
    return "zero: it is missing"


def _factor(
    mine: Tensors, theirs: Tensors, rows: Sequence[int], worst: str
) -> str | None:
    if any(not bool(torch.isfinite(v).all()) or v.shape != theirs[n].shape
           for n, v in mine.items()):  # fmt: skip
        return None
    a = torch.cat([v.double().reshape(-1) for v in mine.values()])
    b = torch.cat([theirs[n].double().reshape(-1) for n in mine])
    factor, size = float(a @ b / (b @ b).clamp_min(1e-300)), a.norm() * b.norm()
    if float(a @ b) > 0.98 * float(size) and float(size) > 0 and abs(factor - 1) > 0.02:
        return f"a constant factor {factor:.4g}: a scale is applied twice, or not at all"
    return None


def _some_rows(
    mine: Tensors, theirs: Tensors, rows: Sequence[int], worst: str
) -> str | None:
    value = mine[worst]
    if value.ndim < 2 or not rows or len(rows) == value.shape[0]:
        return None
    return f"of {worst}{_span(rows)} of {value.shape[0]}"


def _span(rows: Sequence[int]) -> str:
    return f" rows {min(rows)} to {max(rows)}" if rows else ""


_LOOKS: tuple[Callable[[Tensors, Tensors, Sequence[int], str], str | None], ...] = (
    _not_finite, _zero, _factor, _some_rows,
)  # fmt: skip


CAUSES: tuple[tuple[tuple[str, ...], int, str, str], ...] = (
    (("loss", "gradients"), 1, "weights as loaded",
     ", but the loaded weights are right: forward and backward computed with others"),
    (("loss", "gradients"), 1, "update",
     ", after a correct update: forward and backward computed with other weights than the "
     "optimizer wrote, such as stale ones"),
    (("update",), 0, "gradients", ", from correct gradients: an error of the optimizer"),
    (("gradients", "norm"), 0, "loss",
     ", with a correct loss: an error of the backward or the reduction"),
)  # fmt: skip
"""Quantities that differ first; how many steps earlier which quantity held; the likely cause."""


def conclusion(rows: Sequence[Row]) -> str | None:
    """The first difference, and its likely cause by the comparisons that held before it."""
    first = next((row for row in rows if not row.holds), None)
    if first is None:
        return None
    held = {(row.step, row.quantity) for row in rows if row.holds and row.run == first.run}
    cause = next((
        text for quantities, earlier, quantity, text in CAUSES
        if first.quantity in quantities and (first.step - earlier, quantity) in held
    ), "")  # fmt: skip
    return f"first difference: {first.quantity} in step {first.step} of {first.run}{cause}"
