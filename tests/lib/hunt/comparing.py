"""Compares what a program showed on two sides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tests.lib.hunt.language import Shown

RELATIVE = 1e-4
ABSOLUTE = 2e-6
"""For float32: sums are added in other orders, and steps carry that on."""
LOOSE_RELATIVE = 6e-2
LOOSE_ABSOLUTE = 1.5e-2
"""For programs in which anything is bf16, of which the reference rounds other numbers."""


@dataclass(frozen=True)
class Difference:
    """A shown value that differs. amount: the largest difference, and the bound that it exceeds."""

    name: str
    amount: str


def differences(wanted: Shown, found: Shown, loose: bool) -> list[Difference]:
    """All shown values that differ by more than dtypes explain. loose: anything is bf16."""
    wanted, found = _that_matter(wanted), _that_matter(found)
    names = [name for name, _ in wanted]
    others = [name for name, _ in found]
    if names != others:
        missing = sorted({*names} ^ {*others})
        return [Difference("names", f"shown on one side alone: {missing[:5]}")]
    lines = []
    for (name, one), (_, other) in zip(wanted, found, strict=True):
        amount = _amount(one, other, loose)
        if amount:
            lines.append(Difference(name, amount))
    return lines


def _that_matter(shown: Shown) -> Shown:
    """Without counts and zeros of optimizer state: a parameter without a gradient has none, and one
    with zeros has some."""
    found = []
    for name, value in shown:
        is_state = name.startswith("state ")
        if not is_state or (not name.endswith(" step") and torch.as_tensor(value).any()):
            found.append((name, value))
    return found


def _amount(one: Any, other: Any, loose: bool) -> str:
    """A text if two values differ, else ""."""
    if one is None or other is None:
        # No gradient is a gradient of zeros: which of them is a matter of `set_to_none`.
        given = other if one is None else one
        is_zero = given is None or (isinstance(given, torch.Tensor) and not given.any())
        return "" if is_zero else "None on one side"
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return "" if one == other else f"{one!r} and {other!r}"
    if one.dim() == 0:
        other = other.reshape(()) if other.numel() == 1 else other  # a scalar is sharded as one row
    if one.shape != other.shape:
        return f"shapes {tuple(one.shape)} and {tuple(other.shape)}"
    if one.numel() == 0:
        return ""
    relative, absolute = (LOOSE_RELATIVE, LOOSE_ABSOLUTE) if loose else (RELATIVE, ABSOLUTE)
    bound = absolute + relative * one.abs().max().item()
    if one.isfinite().all() and not other.isfinite().all():
        return "not finite"
    difference = (one.double() - other.double()).abs().nan_to_num(0.0).max().item()
    return "" if difference <= bound else f"{difference:.3g}, bound {bound:.2g}"
