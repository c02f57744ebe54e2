"""Differences of two steps, their bounds, and descriptions of differences.

Pure functions of tensors. A difference of tensors is sum |a - b| / sum |b|, where b is the
reference. Sums of squares are not used: Adam turns differences of tiny gradients into large ones
(their sign decides), and these few elements would dominate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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
class ComparedRow:
    """One comparison: `quantity` of `run` in `step`.

    name: the worst parameter (empty for loss and norm); difference: its difference; remark: shown
    if the difference is beyond the bound; compared: number of parameters.
    """

    run: str
    step: int
    quantity: str
    difference: float
    bound: float
    name: str = ""
    remark: str = ""
    compared: int = 1

    @property
    def holds(self) -> bool:
        """True if the difference is finite and within the bound."""
        return math.isfinite(self.difference) and self.difference <= self.bound


def bound(dtype: str, quantity: str, step: int) -> float:
    """The bound of a quantity in a step (from 1), for the narrowest dtype in its computation."""
    return EPS[dtype] * FACTORS[dtype][quantity] * step


def gap(
    mine: torch.Tensor, theirs: torch.Tensor, allowed: float, floor: float = 0.0
) -> tuple[float, list[int]]:
    """The difference of a tensor from the reference, and the rows whose difference is too large.

    The difference is the larger of two: that of the whole tensor, and that of its worst row divided
    by `ROW`. A row's is too large if, so divided, it exceeds `allowed`. Another shape is infinitely
    far; for elements of `mine` that are not finite the difference is not-a-number, with their rows.
    floor: magnitude of elements below which differences count as rounding."""
    if mine.shape != theirs.shape:
        return math.inf, []
    strange = ~torch.isfinite(mine)
    if strange.any():
        return math.nan, _true_rows(_as_rows(strange).any(1))
    numel = mine.numel()
    if numel == 0:
        return 0.0, []
    off = _as_rows((mine.double() - theirs.double()).abs()).sum(1)
    size = _as_rows(theirs.double().abs()).sum(1)
    width = numel / len(size)
    total = off.sum() / size.sum().clamp_min(max(floor * numel, 1e-300))
    typical = size.mean().clamp_min(max(floor * width, 1e-300))
    # A row that is smaller than the mean row is compared with that.
    per_row = off / size.clamp_min(typical) / ROW
    return max(float(total), float(per_row.max())), _true_rows(per_row > allowed)


def _true_rows(rows: torch.Tensor) -> list[int]:
    return rows.nonzero().flatten().tolist()


def _as_rows(value: torch.Tensor) -> torch.Tensor:
    """The value as a matrix of rows. A vector is cut into rows of 8, because single elements are
    too noisy; zeros fill the last row."""
    if value.ndim >= 2:
        return value.reshape(value.shape[0], -1)
    vector = value.reshape(-1)
    missing = -vector.numel() % 8
    return torch.nn.functional.pad(vector, (0, missing)).reshape(-1, 8)


def compare_tensors(
    run: str,
    step: int,
    quantity: str,
    mine: Tensors,
    theirs: Tensors,
    allowed: float,
) -> ComparedRow:
    """Compares all tensors of one quantity; returns a row for the worst, or for the first that only
    one side has."""
    compared = len(theirs)
    missing = sorted(mine.keys() ^ theirs.keys())
    if missing:
        remark = "only one of the two has it"
        return ComparedRow(
            run,
            step,
            quantity,
            math.inf,
            allowed,
            name=missing[0],
            remark=remark,
            compared=compared,
        )
    total = sum(float(value.double().abs().sum()) for value in theirs.values())
    number = sum(value.numel() for value in theirs.values())
    floor = 1e-3 * total / max(number, 1)
    gaps = {name: gap(mine[name], theirs[name], allowed, floor) for name in theirs}
    # `not <=`, because not-a-number is bad, too.
    bad = [name for name, (difference, _) in gaps.items() if not difference <= allowed]
    worst = max(gaps, key=lambda name: _size(gaps[name][0]))
    difference, rows = gaps[worst]
    remark = ""
    if bad:
        remark = described(bad, list(theirs), worst, rows, len(_as_rows(theirs[worst])))
    return ComparedRow(
        run, step, quantity, difference, allowed, name=worst, remark=remark, compared=compared
    )


def rank_of(row: ComparedRow) -> float:
    """The sort key of rows of one comparison: the worst has the largest."""
    return _size(row.difference)


def _size(difference: float) -> float:
    """The difference, with not-a-number as the largest."""
    return math.inf if math.isnan(difference) else difference


def compare_numbers(
    run: str, step: int, quantity: str, mine: float, theirs: float, allowed: float
) -> ComparedRow:
    """Compares loss or norm, relative to the reference."""
    difference = abs(mine - theirs) / max(abs(theirs), 1e-30)
    remark = f"{mine:.6g} for {theirs:.6g}"
    return ComparedRow(run, step, quantity, difference, allowed, remark=remark)


def significant_update(
    before: Tensors, after: Tensors, gradients: Sequence[Tensors], allowed: float
) -> dict[str, torch.Tensor]:
    """The updates of a step by parameter name, with zeros for elements that no gradient decided.

    A gradient that is smaller than the allowed difference has an arbitrary sign, and Adam steps by
    that. gradients: of all steps so far; one that was larger in any of them decides."""
    found = {}
    for name, new in after.items():
        if name not in before:
            continue
        change = new - before[name]
        sizes = [step[name].abs() for step in gradients if name in step]
        if sizes:
            decided = [size > allowed * size.mean() for size in sizes]
            change *= torch.stack(decided).any(0)
        found[name] = change
    return found


def described(
    names: Sequence[str], everything: Sequence[str], worst: str, rows: Sequence[int], height: int
) -> str:
    """Text about parameters that differ: their number, some of their units, and the rows of the
    worst if not all of its `height` rows differ."""
    units = list(dict.fromkeys(unit_of(name) for name in names))
    some = ", ".join(units[:4])
    where = f"{len(names)} of {len(everything)} parameters, in {some}"
    if not rows or len(rows) == height:
        return where
    return f"{where}; of {worst} rows {min(rows)} to {max(rows)} of {height}"


def unit_of(name: str) -> str:
    """The name of the layer that a parameter belongs to, or the first part of its own name."""
    words = name.split(".")
    for i, word in enumerate(words):
        if word == "layers" and i + 1 < len(words):
            return ".".join(words[: i + 2])
    return words[0]
