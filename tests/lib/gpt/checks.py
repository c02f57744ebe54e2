"""What the numerics suite compares, with its bounds. The tests of the suite's power run the same
functions.

Every function is given full tensors that are the same on all ranks, so that all ranks agree on
the outcome and none is left waiting in a collective.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .gpt import Trainer, batches, forward_backward

Tensors = Mapping[str, torch.Tensor]

GRADIENT = 2e-6
"""Of a tensor's largest magnitude, when both start a step from the same weights."""
NORM = 1e-6
"""Relative, of the norm of all gradients, when both start a step from the same weights."""
FREE = 1e-5
"""Relative, of loss, norm and each weight tensor's norm, after steps that run free."""


@dataclass(frozen=True)
class Step:
    """What one training step gave: loss, norm before clipping, reduced gradients, new weights."""

    loss: float
    norm: float
    gradients: Tensors
    weights: Tensors


def finished(trainer: Any, loss: float) -> Step:
    """The optimizer's step behind backwards of that loss; collective."""
    gradients = trainer.gradients()
    success, norm, zeros = trainer.optimizer.step()
    assert success and zeros is None, (success, zeros)  # skipped, or counted without being asked
    return Step(loss, float(norm), gradients, trainer.params())


def recorded_step(trainer: Trainer, data: list[torch.Tensor]) -> Step:
    """A training step; collective."""
    return finished(trainer, forward_backward(trainer, data))


def free_run(trainer: Trainer, rank: int, steps: int, device: torch.device) -> list[Step]:
    """Steps on the case's own data; collective."""
    case = trainer.case
    return [recorded_step(trainer, batches(case, step, rank, device)) for step in range(steps)]


def assert_same_names(ours: Tensors, reference: Tensors, label: str) -> None:
    assert set(ours) == set(reference), f"{label}: names {set(ours) ^ set(reference)}"


def relative(value: float, reference: float) -> float:
    if reference:
        return abs(value - reference) / abs(reference)
    return abs(value)


def check_gradients(ours: Tensors, reference: Tensors, label: str, bound: float = GRADIENT) -> None:
    """Each gradient within `bound` of its tensor's largest magnitude; zero where that is zero."""
    _check_each(ours, reference, f"{label}: gradient of", bound, float("inf"))


def check_weights(ours: Tensors, reference: Tensors, label: str, bound: float = FREE) -> None:
    """The difference of each weight tensor within `bound` of it, in the Euclidean norm."""
    _check_each(ours, reference, f"{label}: weight", bound, 2)


def _check_each(ours: Tensors, reference: Tensors, label: str, bound: float, norm: float) -> None:
    """The difference of each tensor within `bound` of it, in the norm of that order."""
    assert_same_names(ours, reference, label)
    for name, expected in reference.items():
        difference = ours[name] - expected
        error = float(torch.linalg.vector_norm(difference.double(), norm))
        size = float(torch.linalg.vector_norm(expected.double(), norm))
        assert error <= bound * size, (
            f"{label} {name} is off by {error:.3e}, {error / max(size, 1e-30):.2e} of its size "
            f"{size:.3e}; allowed {bound:.0e}"
        )


def check_number(ours: float, reference: float, label: str, bound: float = FREE) -> None:
    """A loss, or a norm of gradients, relative to the reference's."""
    error = relative(ours, reference)
    assert error <= bound, f"{label} {ours!r}, reference {reference!r}, off by {error:.2e}"


def check_numbers(ours: Step, reference: Step, label: str, bound: float = FREE) -> None:
    for what in ("loss", "norm"):
        check_number(getattr(ours, what), getattr(reference, what), f"{label}: {what}", bound)


def check_step(ours: Step, reference: Step, label: str) -> None:
    """Show (a): both steps began with the same weights."""
    check_gradients(ours.gradients, reference.gradients, label)
    check_numbers(ours, reference, label, NORM)


def check_same_bits(ours: Tensors, reference: Tensors, label: str) -> None:
    assert_same_names(ours, reference, label)
    for name, expected in reference.items():
        different = int((ours[name] != expected).sum())
        assert different == 0, f"{label}: {name} differs in {different} of {expected.numel()} bits"


def check_run_bits(ours: Iterable[Step], reference: Iterable[Step], label: str) -> None:
    """Show (c): losses, gradients and weights of every step are the same numbers."""
    for number, (mine, theirs) in enumerate(zip(ours, reference, strict=True)):
        where = f"{label} step {number}"
        assert mine.loss == theirs.loss, f"{where}: loss {mine.loss!r} != {theirs.loss!r}"
        check_same_bits(mine.gradients, theirs.gradients, f"{where} gradients")
        check_same_bits(mine.weights, theirs.weights, f"{where} weights")
