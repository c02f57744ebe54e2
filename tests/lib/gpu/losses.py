"""Losses and norms of a run of training beside those of Megatron's DDP.

What may differ: DDP is trained again with its gradients rounded to bf16 before each update. By how
much its losses change then, at most, is what a rounding makes of these steps; runs may be
`SENSITIVITY` times as far apart. So is it with norms. A first step is one forward of equal weights.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from megatron_fsdp_adapter.megatron.compat import patches
from megatron_fsdp_adapter.megatron.compat.table import FUSED_WGRAD
from megatron_fsdp_adapter.plan.unsharded_budget import AUTO
from megatron_fsdp_adapter.plan.unsharded_budget import BUDGET_OPTION as BUDGET
from tests.lib.gpt.gpt import Case, Trainer, batches, forward_backward, give_up

STEPS = 20
BATCHES = 4
"""Batches that are trained on in turn, so that losses fall."""
SENSITIVITY = 4
LEAST = 1e-5
"""A relative difference that is always allowed."""
ZERO_3 = "optim_grads_params"


@dataclass(frozen=True)
class Kind:
    """A way to train. ddp: fields of the DDP config. captures: layers are in CUDA graphs."""

    ddp: Mapping[str, Any] = field(default_factory=dict)
    captures: bool = False

    @property
    def finds_budget(self) -> bool:
        return self.ddp.get(BUDGET) == AUTO


KINDS: Mapping[str, Kind] = {
    "eager": Kind(),
    "captured layers": Kind({"fsdp_double_buffer": True}, captures=True),
    "captured layers, auto": Kind({BUDGET: AUTO}, captures=True),
}

Make = Callable[[Case, Kind | None], Trainer]
"""Makes a trainer of ours, or stock DDP's for None."""


class Numbers(NamedTuple):
    """Of each step."""

    losses: list[float]
    norms: list[float]


def train(trainer: Trainer, rank: int, rounded: bool = False) -> Numbers:
    """The numbers of `STEPS` steps. rounded: gradients are rounded to bf16 before each update."""
    device = next(trainer.wrapper.parameters()).device
    found = Numbers([], [])
    for step in range(STEPS):
        loss = forward_backward(trainer, batches(trainer.case, step % BATCHES, rank, device))
        for param in trainer.wrapper.parameters() if rounded else ():
            param.main_grad.copy_(param.main_grad.bfloat16())
        success, norm, _ = trainer.optimizer.step()
        assert success, f"step {step} was skipped"
        found.losses.append(loss)
        found.norms.append(float(norm))
    return found


def reference(make: Make, case: Case, rank: int) -> tuple[Numbers, Numbers]:
    """DDP's numbers, and those with rounded gradients."""
    both = []
    for rounded in (False, True):
        trainer = make(case, None)
        both.append(train(trainer, rank, rounded))
        give_up(trainer.wrapper)
        del trainer
        gc.collect()
    return both[0], both[1]


def farthest(found: Sequence[float], expected: Sequence[float]) -> float:
    """The largest relative difference."""
    both = zip(found, expected, strict=True)
    return max(abs(mine - theirs) / abs(theirs) for mine, theirs in both)


def compare(found: Numbers, known: tuple[Numbers, Numbers], say: str) -> str:
    """AssertionError unless the numbers are within what the module's text allows. Returns what to
    print."""
    exact, rounded = known
    said = []
    for name, mine, theirs, other in zip(Numbers._fields, found, exact, rounded, strict=True):
        allowed = max(SENSITIVITY * farthest(other, theirs), LEAST)
        error = farthest(mine, theirs)
        assert error <= allowed, f"{say}: {name} {mine} for {theirs}: {error:.1e} > {allowed:.1e}"
        said.append(f"{name} off by {error:.1e} of {allowed:.1e}")
    losses = exact.losses
    assert losses[-1] < losses[0], f"{say}: {losses}"
    return f"loss {losses[0]:.4f} to {losses[-1]:.4f}; {', '.join(said)}"


def check_kind(trainer: Trainer, kind: Kind, say: str) -> None:
    """AssertionError unless layers were replayed, and a budget was found, where `kind` says so."""
    if kind.captures:
        graphs = trainer.wrapper._layers
        assert graphs.replayed, f"{say}: nothing was replayed"
        assert not graphs.ran_eagerly, f"{say}: {graphs.ran_eagerly}"
    if kind.finds_budget:
        assert trainer.wrapper.engine.budget.chosen_for, f"{say}: no unit stays unsharded"


_known: dict[tuple[str, str], tuple[Numbers, Numbers]] = {}
"""References of this process, by case and precision."""


def beside_ddp(rank: int, make: Make, case: Case, kind: Kind, precision: str, say: str) -> str:
    """Trains a kind beside DDP. Returns what to print; AssertionError if they differ too much."""
    if case.fused:
        patches.install(FUSED_WGRAD)
    key = (str(case), precision)
    if key not in _known:
        _known[key] = reference(make, case, rank)
    trainer = make(case, kind)
    found = train(trainer, rank)
    check_kind(trainer, kind, say)
    del trainer
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return compare(found, _known[key], say)
